// Gives user code (IsReadByUserCode) a saved tensor at the place in its storage at which it was
// saved.
//
// Tensors that travel together come back in one block, each behind the one before. LibTorch's own
// formulas cannot tell. A custom function or a recomputed segment can: it may call
// as_strided(sizes, strides, storage_offset), or look at storage(). It gets a copy on the device
// with a storage of its own, which holds what was saved and nothing else.
//
// Of a view that is smaller than half of its storage, only the view is saved
// (ExtentToSave). Its storage_offset() then counts from the view's first byte, and as_strided()
// with an offset of its own is an error.

#ifndef PINION_HOOKS_ACTIVATIONS_EXACT_LAYOUT_H_
#define PINION_HOOKS_ACTIVATIONS_EXACT_LAYOUT_H_

#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/activations/tensor_returns.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

// Changes `bytes`, which are ready for use on `stream`. Does nothing for other readers, nor for
// memory that is laid out as it was saved. Throws c10::OutOfMemoryError.
void LayOutForUserCode(const StorageRecord& record, const BoundStream& stream,
                       TensorReturns& returns, BytesOnDevice& bytes);

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_EXACT_LAYOUT_H_
