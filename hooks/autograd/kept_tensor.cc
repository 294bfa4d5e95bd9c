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

// Where the node gets the very tensor, that is the saved one, with the class, the attributes and
// the identity that it has in Python. What vmap wraps refuses to be detached without its
// interpreter: it is kept as it is.
at::Tensor ToKeep(const at::Tensor& tensor, bool node_gets_copy) {
  const bool batched = tensor.key_set().has(c10::DispatchKey::FuncTorchBatched);
  return node_gets_copy && !batched ? DetachedAlias(tensor) : tensor;
}

class KeptTensor : public SavedTensor {
 public:
  explicit KeptTensor(const at::Tensor& tensor)
      : node_gets_copy_(NodeGetsCopyOf(tensor)),
        tensor_(ToKeep(tensor, node_gets_copy_)),
        version_(tensor) {}

  at::Tensor Unpack() override {
    version_.Check([this] { return Describe(tensor_); });
    return IsShared() || BackwardKeepsGraph() ? Lend(tensor_, node_gets_copy_) : tensor_;
  }

 private:
  // Whether somebody else has its memory, or may come to have it again by a weak reference.
  bool IsShared() const {
    // The program's own tensor may need a gradient by now: autograd copies it then.
    if (!IsPlainTensor(tensor_) || tensor_.requires_grad()) return true;
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
