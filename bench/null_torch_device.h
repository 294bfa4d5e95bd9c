// A LibTorch device that does nothing, "null": tensors are addresses without memory.
//
// With bench/null_device.h below the engine it measures the host's cost of a saved tensor. No page
// is committed, so 5,000 tensors of 64 MiB fit on a laptop. Its only operator is the one that hooks
// use to gather small tensors.
//
// Thread safety: thread-safe. Exception: RegisterNullTorchDevice.

#ifndef PINION_BENCH_NULL_TORCH_DEVICE_H_
#define PINION_BENCH_NULL_TORCH_DEVICE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace pinion {

inline constexpr char kNullTorchDevice[] = "null";

// Call it once per process, before the first backward. LibTorch then accepts no other custom
// device.
void RegisterNullTorchDevice();

// Returns floats in one dimension on null:0. Reading them crashes.
at::Tensor NewNullTensor(uint64_t size_bytes);

// A step that only saves tensors. Forward saves them one by one in a chain of autograd nodes.
// Backward unpacks and frees them in reverse order.
//
//   forward    node 0 <- node 1 <- ... <- node N - 1     node i saves what node i - 1 has made
//   backward   LibTorch's engine runs the nodes on the calling thread: what travels between them is
//              one float on the CPU
//
// The time with hooks less the time without is the cost of the hooks.
//
// Thread safety: any number of threads may run steps at once, each its own.
struct SavingStep {
  int tensors = 0;
  uint64_t tensor_bytes = 0;

  // Returns the wall time of one step on "null:0". The scope lives through forward; it may be null.
  using MakeScope = std::function<std::shared_ptr<void>()>;
  double RunUs(const MakeScope& make_scope) const;
};

// Returns hooks that keep each tensor unchanged.
std::shared_ptr<void> HooksThatDoNothing();

}  // namespace pinion

#endif  // PINION_BENCH_NULL_TORCH_DEVICE_H_
