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
#include <c10/core/Stream.h>

#include <cstdint>

namespace pinion {

inline constexpr char kNullTorchDevice[] = "null";

// Call it once per process, before the first backward. LibTorch then accepts no other custom
// device.
void RegisterNullTorchDevice();

// Returns floats in one dimension on null:0. Reading them crashes.
at::Tensor NewNullTensor(uint64_t size_bytes);

// Returns a stream of null:0 other than the default stream.
c10::Stream NullSideStream();

}  // namespace pinion

#endif  // PINION_BENCH_NULL_TORCH_DEVICE_H_
