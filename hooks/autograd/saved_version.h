// The version check that saved-tensor hooks switch off in autograd, done here instead.
//
// Thread safety: immutable. The counter that it looks at is LibTorch's, and atomic.

#ifndef PINION_HOOKS_AUTOGRAD_SAVED_VERSION_H_
#define PINION_HOOKS_AUTOGRAD_SAVED_VERSION_H_

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"

namespace torch::autograd {
struct Node;
}

namespace pinion {

// A tensor's version at the moment it was saved, and the counter that all its views share.
class SavedVersion {
 public:
  explicit SavedVersion(const at::Tensor& tensor);

  const c10::VariableVersion& counter() const { return counter_; }

  // The same version of the same counter: two tensors of one storage for which this is true have
  // the same bytes. One storage can have several counters, which rise on their own (variable_data).
  friend bool operator==(const SavedVersion& a, const SavedVersion& b);

  // Throws what autograd throws when a saved tensor was changed in place since: it names the
  // operator that the tensor is an output of. `describe` tells the message which tensor that is
  // ("Float [16, 32]").
  void Check(absl::FunctionRef<std::string()> describe) const;

 private:
  c10::VariableVersion counter_;
  uint32_t saved_;
  // The operator that made the tensor, for the message. Weak, since the graph must not be kept; the
  // node that asks for the tensor keeps it alive.
  std::weak_ptr<torch::autograd::Node> producer_;
  uint32_t output_ = 0;  // which one of the producer's
};

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_SAVED_VERSION_H_
