#ifndef PINION_HOOKS_CHECKPOINT_CHECKPOINT_OPTIONS_H_
#define PINION_HOOKS_CHECKPOINT_CHECKPOINT_OPTIONS_H_

namespace pinion {

// What is compared between a saved tensor and its recomputation. The number of tensors is always
// compared.
enum class DeterminismCheck {
  kDefault,  // shape, dtype and device
  kNone,
};

// Names and defaults are those of torch.utils.checkpoint. `if_planned` is Pinion's.
struct CheckpointOptions {
  // Recomputes with forward's random numbers. Covers the generators of the CPU, of the device that
  // was current in forward, and of the inputs' devices. Random numbers of other devices differ.
  bool preserve_rng_state = true;
  // Stops a recomputation before the first operator that autograd records and backward does not
  // need. The stop is an exception, which the segment must let pass. With false the whole segment
  // runs, with its side effects (output, running statistics).
  bool early_stop = true;
  DeterminismCheck determinism_check = DeterminismCheck::kDefault;
  // Lets the plan of an enclosing OffloadScope decide, if its session has a memory target in bytes.
  // The plan recomputes the segment, or keeps what it saves, which can then be offloaded. A session
  // with OffloadOptions::kAutoTarget keeps the segment. Without a scope or a memory target, or if
  // the input tensors are on several devices or all on the CPU, the segment is recomputed.
  //
  // All tensors that a planned segment saves must be on the device of its inputs. Pass all tensors
  // that it reads as inputs: a captured tensor stays on the device, and the plan ignores it.
  //
  // Nested planned segments let the plan recompute the whole or only parts. Parts of a recomputed
  // whole are no checkpoints of their own.
  bool if_planned = false;
};

}  // namespace pinion

#endif  // PINION_HOOKS_CHECKPOINT_CHECKPOINT_OPTIONS_H_
