// Tensors over a part of a storage that stand for tensors over all of it.
//
// Their storage_offset() counts from the part's first byte. An offset that a program has computed
// for the whole storage would select other bytes, so as_strided() of such a tensor refuses an
// explicit offset that differs from the tensor's own. Views of the tensor inherit that.
//
// The tensors carry DispatchKey::TESTING_ONLY_GenericWrapper, which LibTorch uses in one test of
// its own. All operators other than as_strided's skip the key, at no cost.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_AUTOGRAD_STORAGE_PART_H_
#define PINION_HOOKS_AUTOGRAD_STORAGE_PART_H_

#include <c10/core/DispatchKeySet.h>

namespace pinion {

// The keys that such a tensor has beside its device's.
c10::DispatchKeySet StoragePartKeys();

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_STORAGE_PART_H_
