// Implements operators on memory itself: empty, views, set_, resize_, copies, item, record_stream.
//
// Every view is native: a view that falls back to the CPU would be a copy and break aliasing.

#ifndef PINION_HOOKS_EMULATED_EMU_MEMORY_OPS_H_
#define PINION_HOOKS_EMULATED_EMU_MEMORY_OPS_H_

#include <c10/core/Storage.h>
#include <torch/library.h>

#include <cstddef>

namespace pinion::emu {

// Registers them in `library`, which implements "aten" for PrivateUse1.
void RegisterMemoryOps(torch::Library& library);

// Resizes the storage on the current stream and keeps the bytes that fit.
void ResizeStorage(const c10::Storage& storage, size_t size_bytes);

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_MEMORY_OPS_H_
