// Where a saved tensor comes from, kept as cheaply as can be until somebody asks.
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
  // `saver` is the node that saves the tensor. Only reads the tensor's fields, so that it may be
  // made with a lock held.
  SavedOrigin(const at::Tensor& tensor, const NodeId& saver);

  const SavedView& view() const { return view_; }
  // The node whose result the tensor is, "ReluBackward0"; empty for a leaf. A node itself would
  // keep its graph alive.
  std::string MadeBy() const;
  // The node that saved it, by autograd's sequence number.
  uint64_t node() const { return node_; }

 private:
  const SavedView view_;
  const std::type_info* const made_by_;  // null: a leaf
  const uint64_t node_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_SAVED_ORIGIN_H_
