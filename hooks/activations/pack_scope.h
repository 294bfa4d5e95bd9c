// The scopes of a session: their identity, the heads of their modules (HeadNodes), and the
// session's interface for them.
//
// Thread safety: a session is thread-safe, since autograd workers save on a scope's behalf. A
// PackScope is constant except its atomic fields, a ScopeModule except its heads, which have a
// lock.

#ifndef PINION_HOOKS_ACTIVATIONS_PACK_SCOPE_H_
#define PINION_HOOKS_ACTIVATIONS_PACK_SCOPE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/hooks/autograd/memory_observer.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/offload_policy.h"
#include "pinion/hooks/plan/parameter_cast.h"

namespace pinion {

// The identity of a scope. Directly nested scopes of one session share it.
struct PackScope {
  PackScope(ScopeId number, CastNotes notes) : id(number), casts(std::move(notes)) {}

  const ScopeId id;
  const CastNotes casts;               // parameters' states at `begin`
  const NodeId begin = CurrentNode();  // places in the graph count from here
  const std::thread::id opened_on = std::this_thread::get_id();
  // Tensors that a thread saves after the end of the scope stay on the device.
  std::atomic<bool> ended = false;
  // Whether forward saved a tensor that could be offloaded, and one of a kind or on a device that
  // cannot. Numbers, which are tensors on the CPU, do not count.
  std::atomic<bool> saved_supported = false;
  std::atomic<bool> saved_unsupported = false;
};

// Recognises the nodes that belong to a head of the scope's module (module_heads.h). Thread-safe.
//
// LibTorch's C++ modules have no hooks around their forward. So a node is recognised by its saved
// tensors: a parameter or buffer of the head, or autocast's cast of a parameter. A cast of a frozen
// parameter has no history and is not recognised. A node saves its tensors one by one, in any
// order. Tensors that it saved before its parameter are still pending, because no tensor is
// offloaded before its operator has returned (docs/maintainers/decisions/0030).
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

// The module that runs in a scope.
struct ScopeModule {
  std::optional<ParameterStorages> parameters;  // and buffers; nothing without a module
  std::unique_ptr<HeadNodes> heads;             // null without heads
};

// Return a new scope's number, and the number of the newest scope.
ScopeId NewScopeId();
ScopeId LastScopeId();

// The session's interface for its scopes.
class PackTarget {
 public:
  virtual ~PackTarget() = default;
  // Returns the calling thread's innermost scope if it is one of the session's; null otherwise. An
  // inner scope continues its prefetch order and its batches.
  virtual std::shared_ptr<PackScope> OuterScope() const = 0;
  // Returns what packs in the scope. It shares the session.
  virtual std::shared_ptr<SavedTensorPacker> NewPacker(ScopeModule module,
                                                       std::shared_ptr<PackScope> scope) = 0;
  // Ends a scope. Call it after `ended` is set and after all operators of the scope have returned,
  // on every thread.
  virtual void EndScope(const PackScope& scope) = 0;
  // Records the states of known parameters when an outermost scope begins.
  virtual CastNotes NoteCasts() = 0;
  // Returns the observer of device allocations for a scope that begins, or null.
  virtual std::shared_ptr<MemoryObserver> Observer() = 0;
};

// Logs that a scope has seen no tensor on its session's device type.
void WarnOfNoTensorOn(c10::DeviceType device_type);

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_PACK_SCOPE_H_
