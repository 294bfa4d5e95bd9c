#include "pinion/hooks/checkpoint/checkpoint.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <exception>
#include <mutex>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/hooks/autograd/libtorch_compat.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/checkpoint/forward_state.h"

namespace pinion::checkpoint_internal {
namespace {

// Ends a recomputation early. ComputeAgain() may see another exception type if the segment runs in
// an interpreter that converts exceptions.
class NothingMoreIsNeeded : public std::exception {
 public:
  const char* what() const noexcept override {
    return "a checkpointed segment was stopped, since what backward needs is computed "
           "(CheckpointOptions::early_stop): let this exception pass";
  }
};

// Orders recomputations that set the process's random number generators. Recursive, because inner
// segments run on the same thread while it is held.
std::recursive_mutex& TheTurn() {
  // Leaked: static destructors may read graphs.
  static auto* const turn = new std::recursive_mutex;
  return *turn;
}

std::optional<c10::Stream> StreamOf(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return std::nullopt;
  return CurrentStream(tensor.device());
}

// Returns whether autograd has made a node for the operator whose kernel runs next. The destructors
// of guards and probes call operators that have none, and must not throw.
bool IsRecorded() {
  thread_local uint64_t node_of_last_kernel = 0;
  const uint64_t node = CurrentNode().sequence;
  const bool has_node = node != std::exchange(node_of_last_kernel, node);
  return has_node && at::GradMode::is_enabled();
}

// Returns the only device other than the CPU that inputs are on, or nothing.
std::optional<c10::Device> DeviceOf(const std::vector<at::Tensor>& inputs) {
  std::optional<c10::Device> device;
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || input.is_cpu()) continue;
    if (device.has_value() && *device != input.device()) return std::nullopt;
    device = input.device();
  }
  return device;
}

}  // namespace

// The graph's side of checkpoint(): a segment of forward whose saved tensors are recomputed.
//
// In forward, autograd saves a handle {segment, number} for each tensor, and the segment stores the
// tensor's shape. The first handle that a backward unpacks runs the segment again. A packer then
// matches tensors to numbers by the order in which they are saved.
//
// Ownership: handles own the segment; the segment owns saved inputs and recomputed tensors. A
// backward's unread recomputed tensors are freed when it ends.
//
// Thread safety: thread-safe, since a backward has a thread per device. One thread at a time
// recomputes a segment. Of segments that set random number generators, one is recomputed at a time
// in the process. mu_ is not held during a recomputation.
class CheckpointedSegment : public std::enable_shared_from_this<CheckpointedSegment> {
 public:
  // Saves the inputs to the open scopes.
  CheckpointedSegment(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs,
                      RunAgain run)
      : options_(options),
        forward_(inputs, options.preserve_rng_state),
        run_(std::move(run)),
        inputs_(MakeNode<CheckpointInputs>(inputs)) {}

  // Returns whether the calling thread's innermost running segment has
  // CheckpointOptions::if_planned.
  static bool RunsPlanned();

  // Throws to end a recomputation on the calling thread that has saved all needed tensors. Call it
  // between two operators.
  static void StopTheOneAround();

  // Returns the packer for the segment's forward.
  std::shared_ptr<SavedTensorPacker> PackerOfForward();
  // Marks the end of forward, by return or exception. Nothing is saved after it.
  void EndForward();

 private:
  class Handle;  // replaces a saved tensor in the graph
  class Packer;
  struct Recomputation;

  struct Description {
    c10::SmallVector<int64_t, 5> sizes;
    at::ScalarType dtype;
    c10::Device device;

    static Description Of(const at::Tensor& tensor);
    bool operator==(const Description& other) const = default;
    std::string ToString() const;
  };
  struct Saved {
    Description description;
    bool is_needed = true;  // its handle is alive
  };
  // A recomputed tensor that has not been read.
  struct Again {
    std::unique_ptr<SavedTensor> kept;
    std::optional<Description> description;
    std::optional<c10::Stream> made_on;  // none on the CPU
  };

  std::unique_ptr<SavedTensor> Save(const at::Tensor& tensor);
  std::unique_ptr<SavedTensor> Collect(const at::Tensor& tensor, const NodeId& node,
                                       Recomputation& recomputation);
  // Throws to end the recomputation if all needed tensors are saved; throws only once. `op` is the
  // operator whose kernel runs next, or null.
  void StopIfDone(const c10::FunctionSchema* op, Recomputation& recomputation);
  at::Tensor Read(size_t number);
  void Forget(size_t number);

  std::shared_ptr<Recomputation> Find(int64_t backward);
  std::shared_ptr<Recomputation> ComputeAgain();
  void Check(const Recomputation& recomputation);

  const CheckpointOptions options_;
  const ForwardState forward_;
  const RunAgain run_;
  const NodeRef<CheckpointInputs> inputs_;

  // Held during a recomputation. Recursive, since a backward inside it may recompute the segment.
  std::recursive_mutex computing_;

  Mutex mu_;
  bool forward_ended_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<Saved> saved_ ABSL_GUARDED_BY(mu_);
  // By id of the running backward.
  absl::flat_hash_map<int64_t, std::shared_ptr<Recomputation>> recomputations_ ABSL_GUARDED_BY(mu_);
};

// One backward's recomputation of the segment. Guarded by the segment's mu_.
struct CheckpointedSegment::Recomputation {
  std::vector<Again> tensors;  // by number
  size_t saved = 0;            // tensors that the run has saved
  NodeId last_saver;           // the node that saved the last one
  bool forward_ended = true;   // at its start: a backward in forward covers only earlier tensors
  bool stopped = false;
};

class CheckpointedSegment::Handle : public SavedTensor {
 public:
  Handle(std::shared_ptr<CheckpointedSegment> segment, size_t number)
      : segment_(std::move(segment)), number_(number) {}
  ~Handle() override { segment_->Forget(number_); }

  at::Tensor Unpack() override { return segment_->Read(number_); }
  bool IsPlaceholder() const override { return true; }

 private:
  const std::shared_ptr<CheckpointedSegment> segment_;
  const size_t number_;
};

// Saves handles in forward, and collects tensors in a recomputation.
class CheckpointedSegment::Packer : public SavedTensorPacker {
 public:
  Packer(std::shared_ptr<CheckpointedSegment> segment, std::shared_ptr<Recomputation> recomputation)
      : segment_(std::move(segment)), recomputation_(std::move(recomputation)) {}

  bool is_planned() const { return segment_->options_.if_planned; }

  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place) override {
    if (recomputation_ == nullptr) return segment_->Save(tensor);
    return segment_->Collect(tensor, place.node, *recomputation_);
  }
  void BeforeKernel(const c10::FunctionSchema& op) override {
    if (recomputation_ != nullptr && IsRecorded()) StopIfDone(&op);
  }
  void StopIfDone(const c10::FunctionSchema* op) const {
    if (recomputation_ != nullptr) segment_->StopIfDone(op, *recomputation_);
  }

 private:
  const std::shared_ptr<CheckpointedSegment> segment_;
  const std::shared_ptr<Recomputation> recomputation_;  // null in forward
};

CheckpointedSegment::Description CheckpointedSegment::Description::Of(const at::Tensor& tensor) {
  Description description = {.sizes = {}, .dtype = tensor.scalar_type(), .device = tensor.device()};
  if (!tensor.is_nested()) description.sizes = tensor.sizes();  // nested tensors have no sizes
  return description;
}

std::string CheckpointedSegment::Description::ToString() const {
  return c10::str(dtype, " ", at::IntArrayRef(sizes), " on ", device);
}

bool CheckpointedSegment::RunsPlanned() {
  const auto* const packing = dynamic_cast<const Packer*>(ActivePacker());
  return packing != nullptr && packing->is_planned();
}

void CheckpointedSegment::StopTheOneAround() {
  const auto* const packing = dynamic_cast<const Packer*>(CurrentPacker());
  if (packing != nullptr) packing->StopIfDone(/*op=*/nullptr);
}

std::shared_ptr<SavedTensorPacker> CheckpointedSegment::PackerOfForward() {
  return std::make_shared<Packer>(shared_from_this(), nullptr);
}

void CheckpointedSegment::EndForward() {
  MutexLock lock(mu_);
  forward_ended_ = true;
}

std::unique_ptr<SavedTensor> CheckpointedSegment::Save(const at::Tensor& tensor) {
  Description description = Description::Of(tensor);
  size_t number = 0;
  {
    MutexLock lock(mu_);
    number = saved_.size();
    saved_.push_back({.description = std::move(description)});
  }
  return std::make_unique<Handle>(shared_from_this(), number);
}

std::unique_ptr<SavedTensor> CheckpointedSegment::Collect(const at::Tensor& tensor,
                                                          const NodeId& node,
                                                          Recomputation& recomputation) {
  // A second reference: a backward inside the segment also reads the tensor.
  std::unique_ptr<SavedTensor> kept = KeepTensor(tensor);
  Again again = {KeepTensor(tensor), Description::Of(tensor), StreamOf(tensor)};
  MutexLock lock(mu_);
  const size_t number = recomputation.saved++;
  recomputation.last_saver = node;
  if (number < recomputation.tensors.size() && saved_[number].is_needed) {
    recomputation.tensors[number] = std::move(again);
  }
  return kept;
}

void CheckpointedSegment::StopIfDone(const c10::FunctionSchema* op, Recomputation& recomputation) {
  MutexLock lock(mu_);
  if (!options_.early_stop || recomputation.saved < recomputation.tensors.size()) return;
  // Destructors and handlers that an exception reaches run their operators as usual.
  if (recomputation.stopped || std::uncaught_exceptions() > 0) return;
  // A kernel may write tensors that its operator has just saved, such as the noise of rrelu.
  const bool may_write = op != nullptr && op->is_mutable();
  if (may_write && !HasReturned(recomputation.last_saver, CurrentNode())) return;
  recomputation.stopped = true;
  throw NothingMoreIsNeeded();
}

at::Tensor CheckpointedSegment::Read(size_t number) {
  const int64_t backward = CurrentBackward();
  std::shared_ptr<Recomputation> recomputation = Find(backward);
  if (recomputation == nullptr) {
    const std::lock_guard<std::recursive_mutex> computing(computing_);
    recomputation = Find(backward);  // another thread may have been first
    if (recomputation == nullptr) recomputation = ComputeAgain();
  }
  Again again;
  {
    MutexLock lock(mu_);
    TORCH_CHECK(number < recomputation->tensors.size(), "pinion::checkpoint: saved tensor ", number,
                " of a segment is read by a backward that has computed the segment again already, "
                "when it had saved ",
                recomputation->tensors.size(),
                " tensors: let the backward end before the segment goes on");
    again = std::exchange(recomputation->tensors[number], Again());
  }
  TORCH_CHECK(
      again.kept != nullptr, "pinion::checkpoint: saved tensor ", number,
      " of a segment is read for the second time in one backward, and was let go of after "
      "the first. A node that reads its saved tensors more than once must keep them itself");
  at::Tensor tensor = again.kept->Unpack();
  if (again.made_on.has_value())
    WaitForTensor(tensor, *again.made_on, CurrentStream(tensor.device()));
  return tensor;
}

void CheckpointedSegment::Forget(size_t number) {
  std::vector<Again> gone;  // destroyed after mu_ is unlocked
  MutexLock lock(mu_);
  saved_[number].is_needed = false;
  for (const auto& [backward, recomputation] : recomputations_) {
    if (number < recomputation->tensors.size()) {
      gone.push_back(std::exchange(recomputation->tensors[number], Again()));
    }
  }
}

std::shared_ptr<CheckpointedSegment::Recomputation> CheckpointedSegment::Find(int64_t backward) {
  MutexLock lock(mu_);
  const auto found = recomputations_.find(backward);
  return found == recomputations_.end() ? nullptr : found->second;
}

// Outside of a backward each read recomputes the segment, since no end of a backward frees it.
std::shared_ptr<CheckpointedSegment::Recomputation> CheckpointedSegment::ComputeAgain() {
  // Releases aliases of the later segment's tensors, which are not needed.
  SettleLoans();
  const auto recomputation = std::make_shared<Recomputation>();
  {
    MutexLock lock(mu_);
    recomputation->tensors.resize(saved_.size());
    recomputation->forward_ended = forward_ended_;
  }
  {
    const ForwardState::Place place(forward_);
    const std::vector<at::Tensor> inputs = inputs_->Unpack();  // may recompute an outer segment
    // Locked last, so that a thread that waits here does not block the lock's owner.
    std::unique_lock<std::recursive_mutex> turn(TheTurn(), std::defer_lock);
    if (forward_.has_generators()) turn.lock();
    const ForwardState::Mode mode(forward_);
    const at::AutoGradMode grad(true);
    const SavedTensorScope scope(std::make_shared<Packer>(shared_from_this(), recomputation));
    std::optional<KernelScope> kernels;
    if (options_.early_stop) kernels.emplace();
    try {
      run_(inputs);
    } catch (...) {
      MutexLock lock(mu_);
      if (!recomputation->stopped) throw;
    }
  }
  Check(*recomputation);
  const int64_t backward = CurrentBackward();
  if (backward == -1) return recomputation;
  {
    MutexLock lock(mu_);
    recomputations_.emplace(backward, recomputation);
  }
  AtEndOfBackward([weak = weak_from_this(), backward] {
    const std::shared_ptr<CheckpointedSegment> self = weak.lock();
    if (self == nullptr) return;
    std::shared_ptr<Recomputation> gone;  // destroyed after mu_ is unlocked
    MutexLock lock(self->mu_);
    const auto found = self->recomputations_.find(backward);
    gone = std::move(found->second);
    self->recomputations_.erase(found);
  });
  return recomputation;
}

void CheckpointedSegment::Check(const Recomputation& recomputation) {
  MutexLock lock(mu_);
  const size_t expected = recomputation.tensors.size();
  // A stopped run has saved all needed tensors. A run during forward also saves tensors that
  // forward has not reached.
  const bool may_save_more = recomputation.stopped || !recomputation.forward_ended;
  TORCH_CHECK(recomputation.saved <= expected || may_save_more,
              "pinion::checkpoint: the segment saves more tensors when it is computed again, ",
              recomputation.saved, ", than the ", expected,
              " that it saved in forward. A segment must do the same each time it runs");
  TORCH_CHECK(recomputation.saved >= expected,
              "pinion::checkpoint: a different number of tensors was saved when a segment was "
              "computed again, ",
              recomputation.saved, ", than in forward, ", expected,
              ". A segment must do the same each time it runs");
  if (options_.determinism_check == DeterminismCheck::kNone) return;
  std::string differences;
  for (size_t number = 0; number < expected; ++number) {
    const std::optional<Description>& again = recomputation.tensors[number].description;
    const Saved& saved = saved_[number];
    if (!again.has_value() || *again == saved.description) continue;
    differences += c10::str("\n  tensor ", number, ": saved ", saved.description.ToString(),
                            ", computed again ", again->ToString());
  }
  TORCH_CHECK(differences.empty(),
              "pinion::checkpoint: tensors of a segment have different metadata when they are "
              "computed again. A segment must do the same each time it runs:",
              differences);
}

struct ForwardScope::State {
  State(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs, RunAgain again) {
    // A planned segment must have one device. Others are checkpoints of their own.
    const std::optional<c10::Device> device = options.if_planned ? DeviceOf(inputs) : std::nullopt;
    if (device.has_value()) {
      if (CheckpointedSegment::RunsPlanned()) return;  // part of the enclosing recomputation
      const std::optional<uint32_t> ordinal = KeepSegment({.device = *device, .inputs = inputs});
      if (ordinal.has_value()) {
        part.emplace(SegmentPart{.device = *device, .ordinal = *ordinal, .packer = ActivePacker()});
        return;
      }
    }
    segment = std::make_shared<CheckpointedSegment>(options, inputs, std::move(again));
    CheckpointedSegment::StopTheOneAround();  // the inputs may be its last needed tensors
    scope.emplace(segment->PackerOfForward());
  }
  ~State() {
    if (segment != nullptr) segment->EndForward();
  }

  // `part` is set if the segment is kept, `segment` and `scope` if it is recomputed by itself, none
  // if an enclosing planned segment recomputes it.
  std::optional<SegmentPartScope> part;
  std::shared_ptr<CheckpointedSegment> segment;
  std::optional<SavedTensorScope> scope;
};

ForwardScope::ForwardScope(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs,
                           RunAgain again)
    : state_(std::make_unique<State>(options, inputs, std::move(again))) {}

ForwardScope::~ForwardScope() = default;

}  // namespace pinion::checkpoint_internal
