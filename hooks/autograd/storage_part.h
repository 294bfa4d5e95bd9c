// Marks a tensor over a part of a storage that stands for a tensor over the whole storage.
//
// The tensor's storage_offset() counts from the part's first byte, so an offset that a program
// computed for the whole storage would select other bytes. as_strided() of the tensor or its views
// therefore throws if an explicit offset differs from the tensor's own.
//
// The mark is DispatchKey::TESTING_ONLY_GenericWrapper, which LibTorch uses in one of its tests.
// Other operators skip the key at no cost.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_AUTOGRAD_STORAGE_PART_H_
#define PINION_HOOKS_AUTOGRAD_STORAGE_PART_H_

#include <c10/core/DispatchKeySet.h>

namespace pinion {

// Returns the dispatch keys to add to the tensor's own.
c10::DispatchKeySet StoragePartKeys();

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_STORAGE_PART_H_
