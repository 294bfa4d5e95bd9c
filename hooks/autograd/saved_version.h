// Detects that a saved tensor was changed in place: autograd's check, which saved-tensor hooks
// switch off.
//
// Thread safety: immutable; LibTorch's version counter is atomic.

#ifndef PINION_HOOKS_AUTOGRAD_SAVED_VERSION_H_
#define PINION_HOOKS_AUTOGRAD_SAVED_VERSION_H_

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <string>
#include <typeinfo>

#include "absl/functional/function_ref.h"

namespace pinion {

// A tensor's version when it was saved, and the version counter that it shares with its views.
class SavedVersion {
 public:
  explicit SavedVersion(const at::Tensor& tensor);

  const c10::VariableVersion& counter() const { return counter_; }

  // Compares counter and version. Two tensors of one storage that compare equal have the same
  // bytes. One storage can have several independent counters (variable_data()).
  friend bool operator==(const SavedVersion& a, const SavedVersion& b);

  // Throws autograd's error if the tensor was changed in place after it was saved. The message has
  // the operator that computed the tensor, and what `describe` returns ("Float [16, 32]").
  void Check(absl::FunctionRef<std::string()> describe) const;

 private:
  c10::VariableVersion counter_;
  uint32_t saved_;
  // The class of the node that made the tensor, for the message; null without one. No reference: a
  // strong one keeps the graph alive, and in some releases a weak one keeps the node.
  const std::type_info* producer_ = nullptr;
  uint32_t output_ = 0;  // index among the producer's outputs
};

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_SAVED_VERSION_H_
