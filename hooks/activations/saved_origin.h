// Where a saved tensor comes from. Formats texts only on demand.
//
// Thread safety: immutable.

#ifndef PINION_HOOKS_ACTIVATIONS_SAVED_ORIGIN_H_
#define PINION_HOOKS_ACTIVATIONS_SAVED_ORIGIN_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <typeinfo>

#include "pinion/hooks/activations/saved_view.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

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
