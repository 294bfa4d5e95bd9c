// How an OffloadSession behaves. Plain data; the defaults fit most programs.

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
  // False makes every scope do nothing. The environment variable PINION_DISABLE=1 does the same.
  bool enabled = true;

  // Saved tensors of at least this many bytes are offloaded.
  uint64_t min_offload_bytes = kMinOffloadBytes;

  // True: copies run beside the compute, backward prefetches. False, as a baseline: the host waits
  // for each copy. Forward then waits for what an operator has saved at the next operator that
  // saves something, or at the end of the scope, and backward for what it unpacks.
  bool overlap = true;

  // Device bytes of saved tensors that are kept before the oldest is dropped: the ones saved last
  // stay on the device, and copies out have this long to finish beside the compute. Larger hides
  // more of the link, smaller saves more memory. kAutoWindow: the largest of twice the fourth
  // largest tensor (of this scope or of the last one, whichever is larger), a sixteenth of what the
  // last scope saved (up to 256 MiB), and a sixth of that (up to 64 KiB); a tensor that is larger
  // than half of the window counts as half. A tensor counts with all of its storage, which may be
  // larger than itself. Beside the window, up to half as much waits for company to leave with. 0 is
  // refused.
  uint64_t eviction_window_bytes = kAutoWindow;

  // The same window in saved tensors: the device memory of one goes when so many others were saved
  // on its device after it, kept ones included, and its copy was submitted. From 1 on. TRL's
  // max_fwd_stash_size, which is 5 by default. No tensor waits for company: small ones have a copy
  // each, or one for each operator that saves several. kNoTensorWindow: the window in bytes, which
  // this one takes the place of. Without overlap there is no window.
  uint64_t eviction_window_tensors = kNoTensorWindow;

  // Device bytes that were fetched ahead of need and not read yet; of a tensor only what comes
  // back. kAutoWindow: the same window as for eviction.
  uint64_t prefetch_window_bytes = kAutoWindow;

  // All that LibTorch's allocator may have given out on a device, parameters and optimizer state
  // included, while a step runs: from the first tensor that a scope saves until backward needs none
  // of them. The session then records steps, plans them (engine/planner/plan_step.h) and runs later
  // ones as planned: what need not leave stays and is not copied. The first step, and others that
  // are not known, take the least memory that can be; a target below that is reported in the log,
  // with the least, and all leaves. OffloadStats::steps_over_target counts steps that had more.
  // kAutoTarget: the least with which a step takes at most 1 % more than without offload.
  // kNoTarget: by the windows above, which a target replaces.
  uint64_t memory_target_bytes = kNoTarget;

  // Leaves that are no parameters, a network's input for example, stay on the device as long as
  // somebody holds them once their operator has returned, since a copy frees nothing. True copies
  // them as well: for a program that lets go of its inputs before backward. With a memory target in
  // bytes they are copied in any case.
  bool offload_leaves = false;

  // Weights that autocast has cast are not copied, from the second scope on that sees them:
  // backward casts the parameter once more, to the same bytes. Switch it off where parameters
  // change between a forward and its backward: that is a c10::Error, or goes unseen where it raises
  // no version (`.data`, other libraries' kernels). Casts of frozen weights are copied, since
  // nothing tells where they come from: keep such weights in the low precision.
  bool cast_weights_again = true;

  // What the link can do: it decides which tensors are small enough to share a copy. Without it,
  // each device is measured when it is first used, which takes up to a few hundred milliseconds; a
  // device that cannot be measured then is taken for a PCIe 4 one (AssumedLink). Give it, of an
  // earlier run for example, where runs must not differ.
  std::optional<LinkCalibration> link;

  // Every saved tensor that comes back is checked against a checksum that was taken on the device
  // when its copy out was submitted (tensor_checksum.h). Bytes that differ are a c10::Error that
  // names the tensor and its transfers. To find faults with: it waits for the device whenever a
  // fetched tensor is unpacked. The environment variable PINION_VERIFY=1 does the same.
  bool verify = false;

  AllocatorOptions allocator;
  EngineOptions engine;  // its `trace` is told the hooks' ranges, too
  // Where saved tensors rest while they are away (engine/tier/backing.h); null: in pinned memory.
  std::shared_ptr<Backing> backing = nullptr;

  static constexpr uint64_t kAutoWindow = UINT64_MAX;
  static constexpr uint64_t kNoTensorWindow = UINT64_MAX;
  static constexpr uint64_t kNoTarget = 0;
  static constexpr uint64_t kAutoTarget = UINT64_MAX;

  absl::Status Validate() const;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_OFFLOAD_OPTIONS_H_
