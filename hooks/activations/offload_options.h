// Options of an OffloadSession. The defaults fit most programs.

#ifndef PINION_HOOKS_ACTIVATIONS_OFFLOAD_OPTIONS_H_
#define PINION_HOOKS_ACTIVATIONS_OFFLOAD_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/tier/backing.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/hooks/plan/offload_policy.h"

namespace pinion {

struct OffloadOptions {
  // False makes every scope a no-op, like PINION_DISABLE=1 in the environment.
  bool enabled = true;

  // Tensors smaller than this are not offloaded.
  uint64_t min_offload_bytes = kMinOffloadBytes;

  // True: copies overlap with compute, and backward prefetches. False, as a baseline: the host
  // waits for each copy. Forward waits at the next save, or at the end of the scope; backward waits
  // in each unpack.
  bool overlap = true;

  // Bytes of the most recently saved tensors that stay on the device; older ones are evicted.
  // Copies out have this long to finish. A larger window hides more of the link, a smaller one
  // saves more memory. A tensor counts with its whole storage. Up to half of the window more may
  // wait to be batched with other tensors. 0 is refused.
  //
  // kAutoWindow is the largest of
  //   - twice the fourth largest tensor of this scope or of the last one,
  //   - a sixteenth of what the last scope saved, up to 256 MiB,
  //   - a sixth of what the last scope saved, up to 64 KiB.
  // A tensor that is larger than half of that window counts as half.
  uint64_t eviction_window_bytes = kAutoWindow;

  // The eviction window in tensors instead of bytes. A tensor is evicted when its copy was
  // submitted and this many tensors were saved after it. Tensors that stay on the device count. At
  // least 1. TRL's max_fwd_stash_size, which is 5 by default. Tensors are not batched: each has its
  // own copy, except small ones that one operator saves. kNoTensorWindow: the window in bytes
  // applies. Without overlap there is no window.
  uint64_t eviction_window_tensors = kNoTensorWindow;

  // Bytes that may be prefetched and not yet read. Only a tensor's saved part counts. kAutoWindow:
  // the size of the eviction window.
  uint64_t prefetch_window_bytes = kAutoWindow;

  // The most bytes that LibTorch's allocator may have allocated on a device during a step, with
  // parameters and optimizer state. A step lasts from a scope's first save until backward needs
  // none of its tensors.
  //
  // The session records steps, plans them (engine/planner/plan_step.h) and follows the plan in
  // later ones: tensors that fit the target stay on the device. Steps without a plan, such as the
  // first, use as little memory as possible. If the target is below the least possible, the log
  // reports the least, and everything is offloaded. OffloadStats::steps_over_target counts steps
  // that exceeded the target.
  //
  // kAutoTarget: the least memory with which a step takes at most 1 % longer than without offload.
  // kNoTarget: the windows above apply, which a target replaces.
  uint64_t memory_target_bytes = kNoTarget;

  // Whether leaves that are no parameters, such as a network's input, are copied while the program
  // references them after their operator. A copy frees memory only if the program releases its
  // reference before backward. With a memory target in bytes they are copied in any case.
  bool offload_leaves = false;

  // Casts of weights by autocast are not copied, from the second scope on: backward recasts the
  // parameter to the same bytes. Set it to false if parameters change between a forward and its
  // backward. Such a change throws c10::Error. Exception: a change that raises no version (`.data`,
  // other libraries' kernels) goes undetected. Casts of frozen weights have no link to their
  // parameter and are copied: store such weights in the low precision.
  bool cast_weights_again = true;

  // The link's speed, which decides which tensors share a copy. If empty, each device is measured
  // at its first use, for up to a few hundred milliseconds. A device that cannot be measured counts
  // as PCIe 4 (AssumedLink). Set it, for example from an earlier run, to make runs reproducible.
  std::optional<LinkCalibration> link;

  // Compares each tensor that is fetched or recast with a checksum from before it was released
  // (tensor_checksum.h). A difference throws c10::Error with the tensor and its transfers. For
  // debugging: the host waits for the device in each such unpack. PINION_VERIFY=1 does the same.
  bool verify = false;

  AllocatorOptions allocator;
  EngineOptions engine;  // its `trace` also gets the hooks' ranges
  // Where offloaded tensors are stored (engine/tier/backing.h); null for pinned memory.
  std::shared_ptr<Backing> backing = nullptr;

  static constexpr uint64_t kAutoWindow = UINT64_MAX;
  static constexpr uint64_t kNoTensorWindow = UINT64_MAX;
  static constexpr uint64_t kNoTarget = 0;
  static constexpr uint64_t kAutoTarget = UINT64_MAX;

  absl::Status Validate() const;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_OFFLOAD_OPTIONS_H_
