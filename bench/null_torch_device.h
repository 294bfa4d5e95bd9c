// A LibTorch device that does nothing, "null": tensors are addresses that nothing stands behind.
//
// With bench/null_device.h below the engine it shows what the host alone pays for a saved tensor:
// nothing is simulated, copied or computed, and no page is ever committed, so that 5,000 tensors of
// 64 MiB fit on a laptop. Its only operator is the one that hooks gather small tensors with.
//
// Thread safety: thread-safe, but for RegisterNullTorchDevice.

#ifndef PINION_BENCH_NULL_TORCH_DEVICE_H_
#define PINION_BENCH_NULL_TORCH_DEVICE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace pinion {

inline constexpr char kNullTorchDevice[] = "null";

// Once per process, before the first backward. No other device of a program's own can be registered
// then.
void RegisterNullTorchDevice();

// Floats in one dimension, on null:0. Reading them crashes.
at::Tensor NewNullTensor(uint64_t size_bytes);

// A stream of null:0 beside its default stream.
c10::Stream NullSideStream();

}  // namespace pinion

#endif  // PINION_BENCH_NULL_TORCH_DEVICE_H_
