// Views bytes of a storage as a tensor, without a call of the dispatcher.

#ifndef PINION_HOOKS_AUTOGRAD_STORAGE_VIEW_H_
#define PINION_HOOKS_AUTOGRAD_STORAGE_VIEW_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace pinion {

// Returns the `size_bytes` bytes from `begin_bytes` as a vector of `type`. Both must be multiples
// of the type's size. The tensor shares the storage and has no history.
at::Tensor ViewOfStorage(c10::Storage storage, c10::ScalarType type, uint64_t begin_bytes,
                         uint64_t size_bytes);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_STORAGE_VIEW_H_
