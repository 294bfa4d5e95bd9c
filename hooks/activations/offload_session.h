// Activation offload for LibTorch, in three lines.
//
//   auto session = pinion::OffloadSession::Create({}, pinion::CudaBackend()).value();
//   {
//     pinion::OffloadScope scope(session, *model);      // tensors that autograd saves in here ...
//     loss = torch::cross_entropy_loss(model->forward(x), y);
//   }
//   loss.backward();                                    // ... come back just in time in here
//
// What autograd saves for backward is copied to pinned host memory on a stream of its own; the
// device memory goes once the copy is done and a window of bytes has passed; backward fetches it
// ahead of need. Results are bit-identical with and without.
//
// All copies out of a device run on one stream, after the work of whatever stream saved the tensor:
// a program with independent streams sees them wait for each other's copies.
//
// Every saved tensor's handle owns its host data: graphs may be dropped, kept (retain_graph),
// interleaved or abandoned by an exception without anything to clean up.
//
// Thread safety: OffloadSession is thread-safe; backward's worker threads unpack concurrently. A
// scope belongs to the thread that made it (and to the autograd workers that run on its behalf).
// One that ends out of order, or on another thread, is an error in the log, and packs nothing from
// then on.
// Ownership: a graph may outlive the session; it keeps the tier and what is known of its tensors.
// Errors: bad options are InvalidArgument, a backend without a device is NotFound. Inside forward
// and backward, errors are c10::Error: the ones that autograd itself would raise, a tensor on an
// accelerator that the backend is not for, and c10::OutOfMemoryError. Running out of host memory is
// not an error: the tensor then stays on the device, and the statistics say so.

#ifndef PINION_HOOKS_ACTIVATIONS_OFFLOAD_SESSION_H_
#define PINION_HOOKS_ACTIVATIONS_OFFLOAD_SESSION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device_backend.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/explain_plan.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/hooks/activations/live_tensor.h"
#include "pinion/hooks/activations/module_heads.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_stats.h"

namespace pinion {

class OffloadSession : public std::enable_shared_from_this<OffloadSession> {
 public:
  // Logs the switches of the environment that are on (hooks/environment.h). A session that is not
  // enabled asks for no device. Tensors go to the pool of pinned memory that all sessions and
  // pin_memory() share (engine/tier/host_tier.h): by OffloadOptions::allocator, or `allocator`, a
  // program's own, if that is given. FailedPrecondition where others use a pool, or engines, that
  // were made with other options; it names the first of them. Unimplemented for a memory target
  // where LibTorch's allocator of the device does not tell how much it has given out.
  static absl::StatusOr<std::shared_ptr<OffloadSession>> Create(
      const OffloadOptions& options, DeviceBackend backend,
      std::shared_ptr<PinnedAllocator> allocator = nullptr);
  virtual ~OffloadSession() = default;

  virtual const OffloadOptions& options() const = 0;
  virtual OffloadStats GetStats() const = 0;
  // Of all who share the pool.
  virtual AllocatorStats GetAllocatorStats() const = 0;
  // Of all who share the device's engine. All zeros for a device that does not exist, or that this
  // session has not used yet.
  virtual EngineStats GetEngineStats(int device_index) const = 0;

  // What transfers of the device are planned from; empty until the device is first used. Of a run
  // that measured it, it serves later ones as OffloadOptions::link.
  virtual std::optional<LinkCalibration> GetLink(int device_index) const = 0;

  // With a memory target: the steps that were planned, with their plans. The step that ran last
  // comes first. Empty without a target, and until a step was planned.
  virtual std::vector<PlannedStep> PlannedSteps(int device_index) const = 0;
  // The same as text: what each step moves, when, and what that costs by the model of the link
  // (engine/planner/explain_plan.h).
  std::string Explain(int device_index) const {
    std::string text;
    for (const PlannedStep& planned : PlannedSteps(device_index)) text += ExplainPlan(planned);
    return text;
  }

  // What graphs hold by this session: device by device, and in the order in which scopes saved it
  // last (live_tensor.h). For people: it looks at each of them.
  virtual std::vector<LiveTensor> LiveTensors() const = 0;

  // Sets the device up and pins what a step of training keeps in host memory, so that no pack has
  // to: 0.1 to 1 s per GiB. Errors as those of PinnedAllocator::Reserve, and of the device.
  virtual absl::Status Reserve(int device_index, uint64_t size_bytes) = 0;

  // Lets go of the device memory of saved tensors that are in host memory, or on their way there:
  // for a program that has run out of device memory, in backward for example, and can try again.
  // They are fetched again when they are needed. Any thread may call it, LibTorch's allocator too
  // (docs/tuning.md). Does not block the host, unless a stream cannot be made to wait for the
  // copies of its tensors, as while it captures a graph: the host waits in its place.
  virtual void FreeDeviceMemory(int device_index) = 0;

  // Gives host memory that is cached, and that nobody uses, back to the system, until the pool has
  // at most `keep_bytes` locked. Returns how many bytes went; 0 for a session that is not enabled.
  // An error is the source's: what it could not unpin is gone from the pool all the same. Unpinning
  // can synchronise a device: call it between steps.
  virtual absl::StatusOr<uint64_t> Trim(uint64_t keep_bytes) = 0;
};

// While it lives, tensors that autograd saves on this thread go to `session`. Make one around a
// whole forward: backward fetches ahead within a scope. Nests: the innermost scope wins. Inside a
// backward, as when a checkpoint computes a block again, nothing leaves: a scope that is made there
// says so in the log. The parameters and buffers of `module` stay on the device, by storage;
// without a module, leaves that require a gradient are taken for parameters.
//
// With `heads`, found once (module_heads.h), what their nodes save stays as well. A node is known
// for a head's by a parameter or buffer of it that it saves: heads without parameters, heads whose
// input needs no gradient, and frozen heads under autocast, whose casts have no link to their
// parameters, open a NoOffloadScope or are wrapped (no_offload_module.h). With a memory target the
// plan decides what stays, and heads are no exception (docs/decisions/0030-heads.md).
class [[nodiscard]] OffloadScope {
 public:
  [[nodiscard]] explicit OffloadScope(std::shared_ptr<OffloadSession> session);
  [[nodiscard]] OffloadScope(std::shared_ptr<OffloadSession> session,
                             const torch::nn::Module& module);
  [[nodiscard]] OffloadScope(std::shared_ptr<OffloadSession> session,
                             const torch::nn::Module& module, const ModuleHeads& heads);
  ~OffloadScope();
  OffloadScope(const OffloadScope&) = delete;
  OffloadScope& operator=(const OffloadScope&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Tensors saved while it lives stay on the device, inside any OffloadScope.
class [[nodiscard]] NoOffloadScope {
 public:
  [[nodiscard]] NoOffloadScope();
  ~NoOffloadScope();
  NoOffloadScope(const NoOffloadScope&) = delete;
  NoOffloadScope& operator=(const NoOffloadScope&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_OFFLOAD_SESSION_H_
