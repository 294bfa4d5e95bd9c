// How much was allocated on a device between two moments, at the most, how much of that came after
// the program had let go of memory that it held, and what was freed.
//
//   peaks.Hold(storage.data());                  // somebody beside the packers has it
//   ... OnDeviceBytes, at each change ...
//   const DevicePeaks::Since since = peaks.Take(allocated_bytes, frees);
//
// Thread safety: thread-safe. Its lock is the last one to be taken.

#ifndef PINION_HOOKS_PLAN_DEVICE_PEAKS_H_
#define PINION_HOOKS_PLAN_DEVICE_PEAKS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion {

class DevicePeaks {
 public:
  struct Freed {
    const void* data = nullptr;
    int64_t later_peak_bytes = 0;  // allocated at the most, from then until the next one went
  };
  struct Since {
    int64_t peak_bytes = 0;
    std::vector<Freed> freed = {};  // of what is held, in the order in which it went
    // Of all memory, what was told; and whether that is all that was freed. It is not where another
    // thread frees, of which nobody tells.
    absl::InlinedVector<const void*, 4> told = {};
    bool told_all = false;
  };

  // As MemoryObserver::OnDeviceBytes.
  void OnDeviceBytes(int64_t allocated_bytes, const void* freed);
  void Hold(const void* data);
  // Nobody holds it any more. OnDeviceBytes does the same for what was freed.
  void Drop(const void* data);
  // Since the last call; `allocated_bytes` are allocated now. `frees`: how often the allocator has
  // freed something by now, if it counts that.
  Since Take(int64_t allocated_bytes, std::optional<int64_t> frees);

 private:
  // Between two moments: a program that saves nothing for long is not remembered for long.
  static constexpr size_t kMaxTold = 1000;

  Mutex mu_;
  Since since_ ABSL_GUARDED_BY(mu_);
  std::optional<int64_t> frees_ ABSL_GUARDED_BY(mu_);  // of the last moment
  absl::flat_hash_set<const void*> held_ ABSL_GUARDED_BY(mu_);
};

// The memory of an object went with the hold of the program, while its packer had none.
struct LetGo {
  int64_t size_bytes = 0;
  int64_t later_peak_bytes = 0;  // as DevicePeaks::Freed has it
};

// By object, in the order in which they went between two moments, between which `peak_bytes` were
// allocated at the most: whether it may count as held until the second moment, as if it had stayed.
// It may not where what came later has taken its place: an object that stays takes room beside
// that.
std::vector<bool> CountAsHeld(int64_t peak_bytes, absl::Span<const LetGo> gone);

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_DEVICE_PEAKS_H_
