// tensor.copy_() to, from, within and between devices.
//
// As on CUDA: copies between tensors of one device are kernels; the others are copies on the
// current stream of the device (of the source's, between two devices), asynchronous when they are
// asked to be and the host's side is pinned. A change of type or layout is made before the link, so
// that the bytes that cross it are the destination's.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_EMULATED_EMU_COPY_H_
#define PINION_HOOKS_EMULATED_EMU_COPY_H_

#include <ATen/core/Tensor.h>

namespace pinion::emu {

// One of the two is on the device. Returns `dst`.
at::Tensor CopyFrom(const at::Tensor& src, const at::Tensor& dst, bool non_blocking);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_COPY_H_
