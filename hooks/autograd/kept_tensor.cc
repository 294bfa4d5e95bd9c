#include "pinion/hooks/autograd/kept_tensor.h"

#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>

#include <string>

#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/hooks/autograd/saved_version.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

// "Float [16, 32]". A nested tensor has no sizes to tell.
std::string Describe(const at::Tensor& tensor) {
  if (tensor.is_nested()) return c10::str(tensor.scalar_type(), " nested tensor");
  return c10::str(tensor.scalar_type(), " ", tensor.sizes());
}

// A leaf keeps no graph, so the saved tensor itself is kept, as without hooks: with what set_data()
// gives it later, and in Python with its class, its attributes and its identity. What vmap wraps
// refuses to be detached without its interpreter: it is kept as it is.
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
  // Whether somebody else has its memory, or may come to have it again by a weak reference.
  bool IsShared() const {
    // Of the program's own tensor the node gets a copy, if only since it was saved.
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
