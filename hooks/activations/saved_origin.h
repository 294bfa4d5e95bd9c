// Where a saved tensor comes from. Formats texts only on demand.
//
// Thread safety: immutable.

#ifndef PINION_HOOKS_ACTIVATIONS_SAVED_ORIGIN_H_
#define PINION_HOOKS_ACTIVATIONS_SAVED_ORIGIN_H_

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/typeid.h>

#include <cstdint>
#include <string>
#include <typeinfo>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

// Metadata of a saved tensor: sizes, strides, offset and dtype, without its storage.
class SavedView {
 public:
  explicit SavedView(const at::Tensor& tensor)
      : sizes_(tensor.sizes()),
        strides_(tensor.strides()),
        offset_bytes_(tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize())),
        dtype_(tensor.dtype()) {}

  // Returns "Float [16, 32]" for messages.
  std::string Describe() const;

  // Returns the tensor over a storage whose bytes are shifted by `shift_bytes` against the
  // original, with `keys` added to its device's. Has a new version counter if `version` is null.
  at::Tensor Over(c10::Storage storage, int64_t shift_bytes, c10::DispatchKeySet keys,
                  const c10::VariableVersion* version) const;

 private:
  const c10::SmallVector<int64_t, 5> sizes_;
  const c10::SmallVector<int64_t, 5> strides_;
  const int64_t offset_bytes_;
  const caffe2::TypeMeta dtype_;
};

class SavedOrigin {
 public:
  // `saver` is the node that saves the tensor. Reads fields only, so it may be called under a lock.
  SavedOrigin(const at::Tensor& tensor, const NodeId& saver);

  const SavedView& view() const { return view_; }
  // Returns the name of the node that computed the tensor, "ReluBackward0"; empty for a leaf. The
  // node itself is not stored, since it would keep its graph alive.
  std::string MadeBy() const;
  // Returns autograd's sequence number of the node that saved the tensor.
  uint64_t node() const { return node_; }

 private:
  const SavedView view_;
  const std::type_info* const made_by_;  // null for a leaf
  const uint64_t node_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_SAVED_ORIGIN_H_
