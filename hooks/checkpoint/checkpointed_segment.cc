#include "pinion/hooks/checkpoint/checkpointed_segment.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
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

// Makes `stream` wait until `tensor` is computed on `made_on`.
void WaitFor(const at::Tensor& tensor, const c10::Stream& made_on, const c10::Stream& stream) {
  if (made_on == stream) return;
  if (kComputedOnOtherStream.enabled()) {
    c10::Event computed(made_on.device_type());
    computed.record(made_on);
    computed.block(stream);
  }
  if (tensor.has_storage()) RecordOnStream(tensor.storage(), stream);
}

}  // namespace

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

class CheckpointedSegment::Packing : public SavedTensorPacker {
 public:
  explicit Packing(std::shared_ptr<CheckpointedSegment> segment) : segment_(std::move(segment)) {}

  bool is_planned() const { return segment_->options_.if_planned; }

 protected:
  CheckpointedSegment& segment() const { return *segment_; }

 private:
  const std::shared_ptr<CheckpointedSegment> segment_;
};

class CheckpointedSegment::ForwardPacker : public Packing {
 public:
  using Packing::Packing;
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    return segment().Save(tensor);
  }
};

class CheckpointedSegment::CollectingPacker : public Packing {
 public:
  CollectingPacker(std::shared_ptr<CheckpointedSegment> segment,
                   std::shared_ptr<Recomputation> recomputation)
      : Packing(std::move(segment)), recomputation_(std::move(recomputation)) {}
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place) override {
    return segment().Collect(tensor, place.node, *recomputation_);
  }
  void BeforeKernel(const c10::FunctionSchema& op) override {
    if (IsRecorded()) StopIfDone(&op);
  }
  void StopIfDone(const c10::FunctionSchema* op) const {
    segment().StopIfDone(op, *recomputation_);
  }

 private:
  const std::shared_ptr<Recomputation> recomputation_;
};

CheckpointedSegment::Description CheckpointedSegment::Description::Of(const at::Tensor& tensor) {
  Description description = {.sizes = {}, .dtype = tensor.scalar_type(), .device = tensor.device()};
  if (!tensor.is_nested()) description.sizes = tensor.sizes();  // nested tensors have no sizes
  return description;
}

std::string CheckpointedSegment::Description::ToString() const {
  return c10::str(dtype, " ", at::IntArrayRef(sizes), " on ", device);
}

CheckpointedSegment::CheckpointedSegment(const CheckpointOptions& options,
                                         const std::vector<at::Tensor>& inputs, Run run)
    : options_(options),
      forward_(inputs, options.preserve_rng_state),
      run_(std::move(run)),
      inputs_(std::make_shared<CheckpointInputs>(inputs)) {}

CheckpointedSegment::~CheckpointedSegment() = default;

bool CheckpointedSegment::RunsPlanned() {
  const auto* const packing = dynamic_cast<const Packing*>(ActivePacker());
  return packing != nullptr && packing->is_planned();
}

void CheckpointedSegment::StopTheOneAround() {
  const auto* const packing = dynamic_cast<const CollectingPacker*>(CurrentPacker());
  if (packing != nullptr) packing->StopIfDone(/*op=*/nullptr);
}

std::shared_ptr<SavedTensorPacker> CheckpointedSegment::Packer() {
  return std::make_shared<ForwardPacker>(shared_from_this());
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
  if (again.made_on.has_value()) WaitFor(tensor, *again.made_on, CurrentStream(tensor.device()));
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
    const SavedTensorScope scope(
        std::make_shared<CollectingPacker>(shared_from_this(), recomputation));
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

}  // namespace pinion
