// Gives user code (IsReadByUserCode) a fetched tensor with its original storage layout.
//
// Tensors of one parcel are fetched into one block. LibTorch's own formulas do not notice. A custom
// function or a recomputed segment may: it can call as_strided(sizes, strides, storage_offset) or
// read storage(). Such a reader gets a copy on the device in a storage of its own.
//
// Of a view that covers less than half of its storage, only the view is saved (ExtentToSave). Its
// storage_offset() then counts from the view's first byte, and as_strided() with another offset
// throws.

#ifndef PINION_HOOKS_ACTIVATIONS_EXACT_LAYOUT_H_
#define PINION_HOOKS_ACTIVATIONS_EXACT_LAYOUT_H_

#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/activations/tensor_returns.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

// Replaces `bytes`, which are ready for use on `stream`, if user code reads them and their layout
// is not the original. Throws c10::OutOfMemoryError.
void LayOutForUserCode(const StorageRecord& record, const BoundStream& stream,
                       TensorReturns& returns, BytesOnDevice& bytes);

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_EXACT_LAYOUT_H_
