#ifndef PINION_HOOKS_CHECKPOINT_CHECKPOINT_OPTIONS_H_
#define PINION_HOOKS_CHECKPOINT_CHECKPOINT_OPTIONS_H_

namespace pinion {

// What is compared of a tensor that was saved and the one that was computed again in its place.
// How many tensors there are is always compared.
enum class DeterminismCheck {
  kDefault,  // shape, dtype and device
  kNone,
};

// The names and defaults are those of torch.utils.checkpoint, which has no `if_planned`.
struct CheckpointOptions {
  // Computes again with the random numbers of forward: those of the generators of the CPU, of the
  // device that is current in forward and of the inputs' devices. A segment that draws on yet
  // another device draws other numbers there.
  bool preserve_rng_state = true;
  // Stops a segment that is computed again before the first kernel that backward does not need.
  // Without it the whole segment runs, with all that it does beside computing (it may print, or
  // update running statistics).
  bool early_stop = true;
  DeterminismCheck determinism_check = DeterminismCheck::kDefault;
  // Within an OffloadScope whose session has a memory target in bytes: the plan decides whether
  // this segment is computed again, or keeps what it saves, which may be offloaded then as without
  // a checkpoint. With OffloadOptions::kAutoTarget, which asks for memory that costs no time, it is
  // kept. It is computed again where no plan decides: without a scope, in a scope by windows, and
  // where its input tensors are on several devices or all on the CPU. What a planned segment saves
  // has to be on the device of its inputs, and what it reads among them: a large tensor that it
  // captures stays on the device while it waits to be computed again, and no plan knows.
  // Planned segments may stand inside of one another, which gives the plan a choice: the whole, or
  // some parts. Where the whole is computed again, its parts are nothing of their own.
  bool if_planned = false;
};

}  // namespace pinion

#endif  // PINION_HOOKS_CHECKPOINT_CHECKPOINT_OPTIONS_H_
