#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>

#include <string>

#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/saved_version.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

// Returns "Float [16, 32]". A nested tensor has no sizes.
std::string Describe(const at::Tensor& tensor) {
  if (tensor.is_nested()) return c10::str(tensor.scalar_type(), " nested tensor");
  return c10::str(tensor.scalar_type(), " ", tensor.sizes());
}

// A leaf keeps no graph, so the tensor itself is kept: later set_data() calls and Python's class,
// attributes and identity apply as without hooks. A tensor that vmap wraps cannot be detached
// without its interpreter and is kept as well.
at::Tensor WithoutGraph(const at::Tensor& tensor) {
  const bool batched = tensor.key_set().has(c10::DispatchKey::FuncTorchBatched);
  return tensor.is_leaf() || batched ? tensor : DetachedAlias(tensor);
}

class KeptTensor : public SavedTensor {
 public:
  explicit KeptTensor(const at::Tensor& tensor)
      : node_gets_copy_(NodeGetsCopyOf(tensor)), tensor_(WithoutGraph(tensor)), version_(tensor) {}

  at::Tensor Unpack() override {
    version_.Check([this] { return Describe(tensor_); });
    return IsShared() || BackwardKeepsGraph() ? Lend(tensor_, node_gets_copy_) : tensor_;
  }

 private:
  // Whether the memory has other owners, or a weak reference could become one.
  bool IsShared() const {
    // The node gets a copy if the tensor requires a gradient, even if only since it was saved.
    if (!IsPlainTensor(tensor_) || NodeGetsCopyOf(tensor_)) return true;
    const c10::weak_intrusive_ptr<c10::StorageImpl> weak = tensor_.storage().getWeakStorageImpl();
    // All owners together count as one weak reference, and this one is the second.
    return weak.use_count() > 1 || weak.weak_use_count() > 2;
  }

  const bool node_gets_copy_;
  const at::Tensor tensor_;
  const SavedVersion version_;
};

}  // namespace

std::unique_ptr<SavedTensor> KeepTensor(const at::Tensor& tensor) {
  return std::make_unique<KeptTensor>(tensor);
}

}  // namespace pinion
