// What stands between a scope and its session: parameters known by storage, statistics, and the
// tensors that stay on the device.
//
// Thread safety: a packer and a session are thread-safe: the autograd workers that run on a scope's
// behalf save as well. A PackScope is constant but for `ended`, a ScopeModule but for its heads,
// which have a lock.
// Ownership: a scope's packer shares its session.

#ifndef PINION_HOOKS_ACTIVATIONS_SCOPE_PACKER_H_
#define PINION_HOOKS_ACTIVATIONS_SCOPE_PACKER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/hooks/activations/cast_sources.h"
#include "pinion/hooks/activations/head_nodes.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/autograd/memory_observer.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/offload_policy.h"

namespace pinion {

// What is saved together: in the scopes of one session of which each is the innermost around the
// next.
struct PackScope {
  PackScope(ScopeId number, CastNotes notes) : id(number), casts(std::move(notes)) {}

  const ScopeId id;
  const CastNotes casts;               // of parameters, from `begin`
  const NodeId begin = CurrentNode();  // places in the graph count from here
  const std::thread::id opened_on = std::this_thread::get_id();
  // What a thread that has outlived the scope saves stays on the device.
  std::atomic<bool> ended = false;
};

// What a scope knows of the module that runs in it.
struct ScopeModule {
  std::optional<ParameterStorages> parameters;  // and buffers; nothing where no module is known
  std::unique_ptr<HeadNodes> heads;             // null: none is to be left alone
};

// The number of a scope that begins now, and of the last one that did.
ScopeId NewScopeId();
ScopeId LastScopeId();

// A session as its scopes see it.
class PackTarget {
 public:
  virtual ~PackTarget() = default;
  // Null: the tensor stays on the device; the reason has been counted.
  virtual std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place,
                                            const ScopeModule& module, const PackScope& scope) = 0;
  // As SavedTensorPacker::KeepSegment.
  virtual std::optional<uint32_t> KeepSegment(const SegmentBegin& segment, ScopeId scope) = 0;
  // Once `ended` is set. No operator that has saved tensors in the scope runs any more, on no
  // thread.
  virtual void EndScope(ScopeId scope) = 0;
  // For an outermost scope that begins now.
  virtual CastNotes NoteCasts() = 0;
  virtual OffloadStatsRecorder& stats() = 0;
  // Whoever wants to know of all device memory that is allocated in a scope that begins now, if
  // anybody does.
  virtual std::shared_ptr<MemoryObserver> Observer() = 0;
};

// In the log: a scope has seen no tensor of its session's device.
void WarnOfNoTensorOn(c10::DeviceType device_type);

class ScopePacker : public SavedTensorPacker {
 public:
  ScopePacker(std::shared_ptr<PackTarget> target, ScopeModule module,
              std::shared_ptr<PackScope> scope);

  const PackTarget& target() const { return *target_; }
  const std::shared_ptr<PackScope>& scope() const { return scope_; }

  // Never null. Its wall time is counted.
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place) override;
  std::optional<uint32_t> KeepSegment(const SegmentBegin& segment) override;

 private:
  const std::shared_ptr<PackTarget> target_;
  const ScopeModule module_;
  const std::shared_ptr<PackScope> scope_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_SCOPE_PACKER_H_
