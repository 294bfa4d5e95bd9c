// Pinned host memory for LibTorch's pin_memory() on "emu", allocated from the machine's source.
//
// It has no cache: every allocation pins, every free unpins when the pending copies have completed.
// It registers with the lowest priority, so that another host allocator can replace it.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_EMULATED_EMU_PINNED_H_
#define PINION_HOOKS_EMULATED_EMU_PINNED_H_

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <unordered_set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion::emu {

class EmuPinnedAllocator final : public at::HostAllocator {
 public:
  static EmuPinnedAllocator& Get();

  c10::DataPtr allocate(size_t size_bytes) override;
  // Returns false if `context` is not a block of this allocator.
  bool record_event(void* data, void* context, c10::Stream stream) override;
  void empty_cache() override;  // unpins released blocks whose copies have completed
  at::HostStats get_stats() override;
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  void copy_data(void* dst, const void* src, size_t size_bytes) const override;

 private:
  struct Block;
  EmuPinnedAllocator() = default;
  static void Delete(void* context);

  Mutex mu_;
  std::unordered_set<Block*> live_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<Block>> released_ ABSL_GUARDED_BY(mu_);  // waiting for their copies
};

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_PINNED_H_
