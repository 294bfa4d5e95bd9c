// A tensor over part of a storage, made without the dispatcher.

#ifndef PINION_HOOKS_AUTOGRAD_STORAGE_VIEW_H_
#define PINION_HOOKS_AUTOGRAD_STORAGE_VIEW_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace pinion {

// The bytes [begin, begin + size) of `storage` as a vector of `type`, of whose size both are
// multiples. Shares the storage; has no history.
at::Tensor ViewOfStorage(c10::Storage storage, c10::ScalarType type, uint64_t begin_bytes,
                         uint64_t size_bytes);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_STORAGE_VIEW_H_
