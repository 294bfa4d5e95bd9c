// Activation offload for LibTorch: moves the tensors that autograd saves for backward to pinned
// host memory, and back to the device before backward reads them.
//
//   auto session = pinion::OffloadSession::Create({}, pinion::CudaBackend()).value();
//   {
//     pinion::OffloadScope scope(session, *model);      // saved tensors are offloaded in here ...
//     loss = torch::cross_entropy_loss(model->forward(x), y);
//   }
//   loss.backward();                                    // ... and prefetched in here
//
// A saved tensor is copied on a separate stream. It is evicted from the device after its copy, when
// a window of newer tensors was saved, or when the plan for a memory target says so
// (OffloadOptions). Results are bit-identical to those without offload.
//
// All copies out of a device use one stream, and each waits for the work of the stream that saved
// its tensor. Independent compute streams therefore delay each other's copies.
//
// The graph owns the host copies. Graphs may be dropped, retained (retain_graph), interleaved, or
// abandoned by an exception without any cleanup.
//
// Thread safety: OffloadSession is thread-safe; backward's threads unpack concurrently. A scope
// belongs to the thread that made it and to the autograd workers that run on its behalf. A scope
// that ends out of order, or on another thread, logs an error and packs nothing from then on.
// Ownership: a graph may outlive the session. It shares the host tier and its tensors' records.
// Errors: Create returns InvalidArgument for bad options and NotFound for a backend without a
// device. Forward and backward throw c10::Error: autograd's own errors, a tensor on another type of
// accelerator than the backend's, and c10::OutOfMemoryError. Lack of host memory is no error: the
// tensor stays on the device, and the statistics count it.

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
  // Returns a session whose host copies use the pinned pool that all sessions and pin_memory()
  // share (engine/tier/host_tier.h). The pool is made from OffloadOptions::allocator, or is
  // `allocator` if given. Logs the environment switches that are on (hooks/environment.h). A
  // session that is not enabled opens no device. Errors besides those above:
  //   FailedPrecondition: the process has a pool or engines with other options; the text names the
  //     first difference.
  //   Unimplemented: a memory target is set, and LibTorch's allocator does not report its bytes.
  static absl::StatusOr<std::shared_ptr<OffloadSession>> Create(
      const OffloadOptions& options, DeviceBackend backend,
      std::shared_ptr<PinnedAllocator> allocator = nullptr);
  virtual ~OffloadSession() = default;

  virtual const OffloadOptions& options() const = 0;
  virtual OffloadStats GetStats() const = 0;
  // Returns statistics of the pool, including its other users.
  virtual AllocatorStats GetAllocatorStats() const = 0;
  // Returns statistics of the device's engine, including its other users. All zeros if the device
  // does not exist or this session has not used it.
  virtual EngineStats GetEngineStats(int device_index) const = 0;

  // Returns the link calibration that transfers are planned with; empty until the device is first
  // used. Pass a measured one to later runs as OffloadOptions::link.
  virtual std::optional<LinkCalibration> GetLink(int device_index) const = 0;

  // With a memory target: the steps that were planned, with their plans. The step that was
  // recognised or planned last comes first. Exception: after a step without a plan, the one that
  // was expected in its place. Empty without a target, and until a step was planned.
  virtual std::vector<PlannedStep> PlannedSteps(int device_index) const = 0;
  // The same as text: what each step moves, when, what that costs by the model of the link, and why
  // the other tensors stay (engine/planner/explain_plan.h).
  std::string Explain(int device_index) const {
    std::string text;
    for (const PlannedStep& planned : PlannedSteps(device_index)) text += ExplainPlan(planned);
    return text;
  }

  // Lists the tensors that graphs hold through this session, by device and by when a scope saved
  // them last (live_tensor.h). For people: the cost is linear in the number of tensors.
  virtual std::vector<LiveTensor> LiveTensors() const = 0;

  // Sets up the device and pins host memory for a training step, so that packing does not have to.
  // Takes 0.1 to 1 s per GiB. Returns the errors of PinnedAllocator::Reserve and of the device.
  virtual absl::Status Reserve(int device_index, uint64_t size_bytes) = 0;

  // Evicts the saved tensors whose copies to host memory were submitted: for a program that has run
  // out of device memory, in backward for example, and can try again. They are fetched again when
  // they are needed. Any thread may call it, LibTorch's allocator too (docs/users/activations.md).
  // Blocks the host only where a stream cannot be made to wait for the copies of its tensors, as
  // while it captures a graph.
  virtual void FreeDeviceMemory(int device_index) = 0;

  // Unpins cached host memory that is not in use, until the pool has at most `keep_bytes`. Returns
  // the bytes that were unpinned; 0 for a session that is not enabled. On an error of the source,
  // memory that it failed to unpin has left the pool as well. Unpinning can synchronise a device:
  // call it between steps.
  virtual absl::StatusOr<uint64_t> Trim(uint64_t keep_bytes) = 0;
};

// Offloads the tensors that autograd saves on this thread to `session`. Make one around a whole
// forward, because prefetch works within a scope. Nests: the innermost scope packs. Inside a
// backward, as in a checkpoint's recomputation, nothing is offloaded and the scope logs a warning.
// The parameters and buffers of `module` stay on the device, recognised by storage. Without a
// module, leaves that require a gradient count as parameters.
//
// With `heads`, found once (module_heads.h), the tensors that their nodes save stay as well. A node
// belongs to a head if it saves a parameter or buffer of the head. Three kinds of heads save none:
// heads without parameters, heads whose input needs no gradient, and frozen heads under autocast.
// Open a NoOffloadScope in these, or wrap them (no_offload_module.h). With a memory target the plan
// decides what stays, and heads are no exception (docs/maintainers/decisions/0030).
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

// Keeps tensors that autograd saves on this thread on the device, inside any OffloadScope.
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
