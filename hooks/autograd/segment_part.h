// Tells which kept checkpoint segment the calling thread runs (SavedTensorPacker::KeepSegment).
//
//   const SegmentPartScope part({.device = device, .ordinal = ordinal});
//   ... the segment runs ...
//
// Step recorders ask CurrentPart() (saved_tensor_hooks.h) when a tensor is saved.
//
// Thread safety: a scope affects only the thread that made it. LibTorch does not carry it to other
// threads.

#ifndef PINION_HOOKS_AUTOGRAD_SEGMENT_PART_H_
#define PINION_HOOKS_AUTOGRAD_SEGMENT_PART_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace pinion {

struct SegmentPart {
  c10::Device device;    // tensors on other devices belong to no segment
  uint32_t ordinal = 0;  // among the step's segments on that device
  // The packer that numbered the segment; only its address is used.
  const void* packer = nullptr;
};

namespace segment_part_internal {

inline thread_local std::optional<SegmentPart> current;

}  // namespace segment_part_internal

// Returns the innermost scope's segment, or nothing.
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
