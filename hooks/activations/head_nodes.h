// Recognises the nodes that belong to a head of the scope's module (module_heads.h).
//
// LibTorch's C++ modules have no hooks around their forward. So a node is recognised by its saved
// tensors: a parameter or buffer of the head, or autocast's cast of a parameter. A cast of a frozen
// parameter has no history and is not recognised. A node saves its tensors one by one, in any
// order. Tensors that it saved before its parameter are still pending, because no tensor is
// offloaded before its operator has returned (docs/maintainers/decisions/0030).
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_ACTIVATIONS_HEAD_NODES_H_
#define PINION_HOOKS_ACTIVATIONS_HEAD_NODES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/offload_policy.h"

namespace pinion {

class HeadNodes {
 public:
  using Storages = absl::InlinedVector<c10::Storage, 2>;

  struct Save {
    bool is_heads = false;      // the node is known to belong to a head
    bool is_parameter = false;  // the tensor is the head's parameter
    Storages earlier;           // living storages that the node saved before its parameter
  };

  explicit HeadNodes(ParameterStorages parameters) : parameters_(std::move(parameters)) {}

  // Reports that `node`, the calling thread's newest, saves `tensor`, a plain strided tensor.
  Save OnSave(const at::Tensor& tensor, const NodeId& node);

 private:
  // The newest node of a thread.
  struct Youngest {
    uint64_t sequence = 0;
    bool is_heads = false;
    absl::InlinedVector<WeakStorage, 2> saved;  // cleared when the node turns out to be a head's
  };

  bool IsParameter(const at::Tensor& tensor) const;

  const ParameterStorages parameters_;
  Mutex mu_;
  absl::flat_hash_map<std::thread::id, Youngest> youngest_ ABSL_GUARDED_BY(mu_);
};

// Keeps `tensor` on the device, and `others` as long as the returned object lives.
std::unique_ptr<SavedTensor> KeepWith(const at::Tensor& tensor, HeadNodes::Storages others);

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_HEAD_NODES_H_
