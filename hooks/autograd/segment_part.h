// Which segment the calling thread's forward runs, of those that could be computed again and that
// are kept (SavedTensorPacker::KeepSegment).
//
//   const SegmentPartScope part({.device = device, .ordinal = ordinal});
//   ... the segment runs ...
//
// Whoever records a step asks CurrentPart() (saved_tensor_hooks.h) when a tensor is saved.
//
// Thread safety: a scope belongs to the thread that made it; other threads see nothing of it, those
// that LibTorch carries scopes to included.

#ifndef PINION_HOOKS_AUTOGRAD_SEGMENT_PART_H_
#define PINION_HOOKS_AUTOGRAD_SEGMENT_PART_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace pinion {

struct SegmentPart {
  c10::Device device;    // of the segment; what it saves on others belongs to nobody
  uint32_t ordinal = 0;  // among the segments of the step on that device
  // Who gave it that number; by its address alone.
  const void* packer = nullptr;
};

namespace segment_part_internal {

inline thread_local std::optional<SegmentPart> current;

}  // namespace segment_part_internal

// Of the innermost scope; nothing outside.
inline std::optional<SegmentPart> CurrentSegmentPart() { return segment_part_internal::current; }

class [[nodiscard]] SegmentPartScope {
 public:
  [[nodiscard]] explicit SegmentPartScope(const SegmentPart& part)
      : outer_(std::exchange(segment_part_internal::current, part)) {}
  ~SegmentPartScope() { segment_part_internal::current = outer_; }
  SegmentPartScope(const SegmentPartScope&) = delete;
  SegmentPartScope& operator=(const SegmentPartScope&) = delete;

 private:
  const std::optional<SegmentPart> outer_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_SEGMENT_PART_H_
