// Implements tensor.copy_() to, from, within and between devices.
//
// As on CUDA, a copy within one device is a kernel. Other copies run on the current stream of the
// device, or of the source's for two devices; they are asynchronous if requested and the host
// memory is pinned. The source converts dtype and layout first, so the link carries the
// destination's bytes.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_EMULATED_EMU_COPY_H_
#define PINION_HOOKS_EMULATED_EMU_COPY_H_

#include <ATen/core/Tensor.h>

namespace pinion::emu {

// Copies `src` into `dst`, at least one of which is on the device. Returns `dst`.
at::Tensor CopyFrom(const at::Tensor& src, const at::Tensor& dst, bool non_blocking);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_COPY_H_
