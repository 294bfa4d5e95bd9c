// Tracks the peak of allocated device memory between two moments, what was freed, and how high the
// peak was after the program freed memory that it had referenced.
//
//   peaks.Hold(storage.data());                  // an object beside the packers owns it
//   ... OnDeviceBytes, at each change ...
//   const DevicePeaks::Since since = peaks.Take(allocated_bytes, frees);
//
// Thread safety: thread-safe. Its lock is the innermost.

#ifndef PINION_HOOKS_PLAN_DEVICE_PEAKS_H_
#define PINION_HOOKS_PLAN_DEVICE_PEAKS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion {

class DevicePeaks {
 public:
  struct Freed {
    const void* data = nullptr;
    int64_t later_peak_bytes = 0;  // peak of allocated bytes from then until the next free
  };
  struct Since {
    int64_t peak_bytes = 0;
    std::vector<Freed> freed = {};  // of the held memory, in the order of the frees
    // Addresses of all reported frees, and whether they are all frees. They are not if a thread
    // frees unobserved.
    absl::InlinedVector<const void*, 4> told = {};
    bool told_all = false;
    int64_t added_bytes = 0;  // total of the reported allocations
  };

  // See MemoryObserver::OnDeviceBytes.
  void OnDeviceBytes(int64_t allocated_bytes, const void* freed, int64_t added_bytes = 0);
  void Hold(const void* data);
  // Removes an address from the held ones. OnDeviceBytes does the same for freed memory.
  void Drop(const void* data);
  // Returns what happened since the last call. `allocated_bytes` are allocated at this moment.
  // `frees` is the allocator's count of frees, if it has one.
  Since Take(int64_t allocated_bytes, std::optional<int64_t> frees);

 private:
  // Bounds the memory for a program that saves nothing for long.
  static constexpr size_t kMaxTold = 1000;

  Mutex mu_;
  Since since_ ABSL_GUARDED_BY(mu_);
  std::optional<int64_t> frees_ ABSL_GUARDED_BY(mu_);  // at the last Take
  absl::flat_hash_set<const void*> held_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_DEVICE_PEAKS_H_
