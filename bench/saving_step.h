// A step that does nothing but save tensors: forward saves them one by one, as a chain of nodes of
// autograd, backward unpacks them in reverse order and lets go of them.
//
//   forward    node 0 <- node 1 <- ... <- node N - 1     node i saves what node i - 1 has made
//   backward   LibTorch's engine runs the nodes on the calling thread: what travels between them is
//              one float on the CPU
//
// What it takes with hooks, less what it takes without any, is what the hooks cost.
//
// Thread safety: any number of threads may run steps at once, each its own.

#ifndef PINION_BENCH_SAVING_STEP_H_
#define PINION_BENCH_SAVING_STEP_H_

#include <cstdint>
#include <functional>
#include <memory>

namespace pinion {

struct SavingStep {
  int tensors = 0;
  uint64_t tensor_bytes = 0;

  // Wall time of one step on "null:0". The scope, any object or none, lives as long as the forward.
  using MakeScope = std::function<std::shared_ptr<void>()>;
  double RunUs(const MakeScope& make_scope) const;
};

// Hooks that keep each tensor as it is.
std::shared_ptr<void> HooksThatDoNothing();

}  // namespace pinion

#endif  // PINION_BENCH_SAVING_STEP_H_
