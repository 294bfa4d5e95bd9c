#include "pinion/bench/offload/replayed_step.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/Device.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/hooks/autograd/libtorch_compat.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

using torch::autograd::Edge;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr size_t kNoUse = SIZE_MAX;

// Consecutive accesses of one operator.
struct Operator {
  size_t begin = 0;
  size_t end = 0;  // past the last access
};

// A tensor that one operator saves several times becomes columns of one matrix, like queries, keys
// and values.
struct Part {
  size_t of = 1;
  size_t index = 0;
};

at::Tensor PartOf(const at::Tensor& object, const Part& part) {
  const at::AutoDispatchBelowADInplaceOrView no_history;
  const auto columns = static_cast<int64_t>(part.of);
  at::Tensor saved = object.view({-1, columns}).select(1, static_cast<int64_t>(part.index));
  torch::autograd::impl::set_version_counter(saved, torch::autograd::impl::version_counter(object));
  return saved;
}

// The record's accesses in the form that autograd needs.
struct Script {
  std::vector<Operator> forward, backward;
  std::vector<size_t> saved_at;       // by use, of a read: the use that saved what it reads
  std::vector<Part> parts;            // by use, of a save
  std::vector<size_t> over;           // by use, of a save: the last interval that needs it
  std::vector<size_t> held_until;     // by object: the last interval; kNoUse: the program keeps it
  std::vector<uint64_t> over_bytes;   // by interval: of the objects that nobody needs behind it
  std::vector<uint64_t> other_bytes;  // by interval, without what is replayed as an object
};

bool IsSave(const StepTrace& step, const ObjectLiveness& life, size_t use) {
  return use == life.accesses.front() || use <= step.objects[step.accesses[use]].saved_until;
}

std::vector<Part> PartsOf(const StepTrace& step, const std::vector<Operator>& forward) {
  std::vector<Part> parts(step.accesses.size());
  for (const Operator& saves : forward) {
    absl::flat_hash_map<uint32_t, size_t> times;
    for (size_t use = saves.begin; use < saves.end; ++use) ++times[step.accesses[use]];
    absl::flat_hash_map<uint32_t, size_t> before;
    for (size_t use = saves.begin; use < saves.end; ++use) {
      const uint32_t object = step.accesses[use];
      if (step.objects[object].size_bytes % times[object] != 0) continue;
      parts[use] = {.of = times[object], .index = before[object]++};
    }
  }
  return parts;
}

absl::StatusOr<Script> ScriptOf(const StepTrace& step) {
  PINION_RETURN_IF_ERROR(step.Validate());
  const std::vector<ObjectLiveness> lives = LivenessOf(step);
  const std::vector<size_t> operator_ends = OperatorEnds(step);
  const size_t uses = step.accesses.size();
  Script script;
  for (size_t use = 0; use < uses; use = operator_ends[use] + 1) {
    const bool saves = IsSave(step, lives[step.accesses[use]], use);
    for (size_t i = use; i <= operator_ends[use]; ++i) {
      if (saves == IsSave(step, lives[step.accesses[i]], i) &&
          (!saves || script.backward.empty())) {
        continue;
      }
      return absl::InvalidArgumentError(absl::StrCat(
          "use ", i, " comes where saves and reads mix: replay one forward and its backward"));
    }
    (saves ? script.forward : script.backward).push_back({use, operator_ends[use] + 1});
  }
  script.parts = PartsOf(step, script.forward);
  script.saved_at.assign(uses, kNoUse);
  script.over.assign(uses, 0);
  script.held_until.resize(step.objects.size());
  script.over_bytes.resize(step.intervals.size());
  for (const StepInterval& interval : step.intervals) {
    script.other_bytes.push_back(interval.other_bytes);
  }
  for (size_t index = 0; index < step.objects.size(); ++index) {
    const StepObject& object = step.objects[index];
    std::vector<size_t> saves;  // that were not read yet
    for (const size_t use : lives[index].accesses) {
      if (IsSave(step, lives[index], use)) {
        saves.push_back(use);
        script.held_until[index] = std::max<size_t>(use + 1, object.held_until);
        script.over[use] =
            object.needed_until > 0 ? object.needed_until : step.intervals.size() - 1;
        continue;
      }
      // Reads take the latest save first. Reads beyond the number of saves take the first save
      // again.
      script.saved_at[use] = saves.back();
      script.over[saves.back()] = operator_ends[use] + 1;
      if (saves.size() > 1) saves.pop_back();
    }
    if (object.frees) {
      size_t over = 0;
      for (const size_t use : lives[index].accesses) over = std::max(over, script.over[use]);
      script.over_bytes[over] += object.size_bytes;
      continue;
    }
    // The program keeps the object alive, so it counts as other bytes where no graph needs it.
    script.held_until[index] = kNoUse;
    for (size_t i = lives[index].made(); i < step.intervals.size(); ++i) {
      script.other_bytes[i] -= std::min(script.other_bytes[i], object.size_bytes);
    }
  }
  return script;
}

class Replay final : public ReplayedStep {
 public:
  Replay(StepTrace step, Script script, std::shared_ptr<EmulatedMachine> machine)
      : step_(std::move(step)),
        script_(std::move(script)),
        machine_(std::move(machine)),
        device_(DeviceTypeOf("emu").value(), 0) {}

  void Run(const MakeScope& make_scope) override {
    made_.assign(step_.objects.size(), at::Tensor());
    made_count_ = 0;
    saves_.resize(step_.accesses.size());
    NodePtr root;
    {
      const std::shared_ptr<void> scope = make_scope();
      root = Forward();
    }
    if (root != nullptr) {
      torch::autograd::Engine::get_default_engine().execute(
          {Edge(root, 0)}, {gradient_}, /*keep_graph=*/false, /*create_graph=*/false,
          /*accumulate_grad=*/true);
    }
    read_.clear();
    saves_.clear();
    made_.clear();
  }

 private:
  // The autograd node of one operator.
  class OperatorNode final : public torch::autograd::TraceableFunction {
   public:
    OperatorNode(Replay& replay, const at::Tensor& gradient) : replay_(replay) {
      add_input_metadata(gradient);
    }
    void Reads(const Operator& reads) { reads_ = reads; }

    variable_list apply(variable_list&& gradients) override {
      replay_.Read(reads_);
      return std::move(gradients);
    }

   private:
    Replay& replay_;
    Operator reads_;
  };

  // Runs forward, and returns backward's first node; each node leads to the next.
  NodePtr Forward() {
    const size_t turn = script_.forward.empty() ? 0 : script_.forward.back().end;
    std::vector<NodeRef<OperatorNode>> by_use(step_.accesses.size());
    // What is saved has a history, as activations have; what the program keeps is an input.
    NodeRef<OperatorNode> node = NewNode();
    for (const Operator& saves : script_.forward) {
      Pass(saves.begin);
      DropHeldBefore(saves.begin);
      const NodeRef<OperatorNode> maker = std::exchange(node, NewNode());
      for (size_t use = saves.begin; use < saves.end; ++use) {
        if (use > saves.begin) Pass(use);
        const at::Tensor saved = PartOf(made_[step_.accesses[use]], script_.parts[use]);
        if (step_.objects[step_.accesses[use]].frees) {
          torch::autograd::impl::set_gradient_edge(saved, Edge(maker, 0));
        }
        saves_[use] = SavedVariable(saved, /*is_output=*/false);
        by_use[use] = node;
      }
    }
    Pass(turn);
    DropHeldBefore(turn);
    std::vector<NodeRef<OperatorNode>> nodes;
    for (const Operator& reads : script_.backward) {
      NodeRef<OperatorNode>& of_save = by_use[script_.saved_at[reads.begin]];
      NodeRef<OperatorNode> node = std::exchange(of_save, nullptr);
      const bool is_taken = std::find(nodes.begin(), nodes.end(), node) != nodes.end();
      if (node == nullptr || is_taken) node = NewNode();
      node->Reads(reads);
      nodes.push_back(std::move(node));
    }
    for (size_t i = nodes.size(); i-- > 0;) {
      nodes[i]->add_next_edge(i + 1 < nodes.size() ? Edge(nodes[i + 1], 0) : Edge());
    }
    return nodes.empty() ? nullptr : nodes.front();
  }

  void Read(const Operator& reads) {
    read_.clear();
    for (size_t use = reads.begin; use < reads.end; ++use) {
      if (use > reads.begin) Pass(use);
      read_.push_back(saves_[script_.saved_at[use]].unpack());
      PINION_CHECK(read_.back().nbytes() * script_.parts[script_.saved_at[use]].of ==
                   step_.objects[step_.accesses[use]].size_bytes);
    }
    Pass(reads.end);
    DropHeldBefore(reads.end);
    read_.clear();
  }

  // The interval before `use`: what it makes, computes, and takes and gives back besides.
  void Pass(size_t use) {
    const StepInterval& interval = step_.intervals[use];
    uint64_t transient_bytes = interval.transient_bytes;
    if (interval.released_bytes > 0) {
      read_.clear();
      ReleaseOver(use);
      // Not all of it had gone before the peak.
      transient_bytes += script_.over_bytes[use] - interval.released_bytes;
    }
    SetOtherBytes(script_.other_bytes[use]);
    if (use < step_.accesses.size() && step_.accesses[use] == made_count_) {
      made_[made_count_] = NewTensor(step_.objects[made_count_].size_bytes);
      ++made_count_;
    }
    {
      const at::Tensor transient = NewTensor(transient_bytes);
      Compute(interval.compute_us);
    }
    ReleaseOver(use);
  }

  // What nobody needs behind the interval before `use`.
  void ReleaseOver(size_t use) {
    if (script_.over_bytes[use] > 0) read_.clear();
    for (size_t save = 0; save < saves_.size(); ++save) {
      if (script_.over[save] == use) saves_[save].reset_data();
    }
  }

  // What the program has held to the end of the interval before `use`.
  void DropHeldBefore(size_t use) {
    for (size_t index = 0; index < made_count_; ++index) {
      if (script_.held_until[index] <= use) made_[index].reset();
    }
  }

  void SetOtherBytes(uint64_t size_bytes) {
    while (other_bytes_ > size_bytes) {
      other_bytes_ -= other_.back().nbytes();
      other_.pop_back();
    }
    if (other_bytes_ == size_bytes) return;
    other_.push_back(NewTensor(size_bytes - other_bytes_));
    other_bytes_ = size_bytes;
  }

  void Compute(double us) {
    if (us == 0) return;
    const StreamHandle stream = NativeStream(CurrentStream(device_));
    Kernel kernel;
    kernel.name = "replayed";
    kernel.memory_bytes = us * machine_->options().preset.memory_gb_per_s * 1e3;
    ThrowIfError(machine_->PrepareKernel(0, stream), "replaying a step");
    ThrowIfError(machine_->Launch(0, stream, kernel), "replaying a step");
  }

  at::Tensor NewTensor(uint64_t size_bytes) const {
    return at::empty({static_cast<int64_t>(size_bytes)},
                     at::TensorOptions(device_).dtype(at::kByte));
  }
  NodeRef<OperatorNode> NewNode() { return MakeNode<OperatorNode>(*this, gradient_); }

  const StepTrace step_;
  const Script script_;
  const std::shared_ptr<EmulatedMachine> machine_;
  const c10::Device device_;
  // The gradient that backward passes on: a CPU float, so that nodes run on the caller's thread.
  const at::Tensor gradient_ = at::ones({1});

  // --- State of the running step ---
  std::vector<at::Tensor> made_;      // by object, while the program holds it
  size_t made_count_ = 0;             // objects so far
  std::vector<SavedVariable> saves_;  // by use
  std::vector<at::Tensor> read_;      // by the current or last operator
  std::vector<at::Tensor> other_;     // lives across steps
  uint64_t other_bytes_ = 0;          // in other_
};

}  // namespace

absl::StatusOr<std::unique_ptr<ReplayedStep>> ReplayedStep::Create(
    StepTrace record, std::shared_ptr<EmulatedMachine> machine) {
  PINION_CHECK(machine->options().preset.launch_us == 0);
  PINION_ASSIGN_OR_RETURN(Script script, ScriptOf(record));
  return std::make_unique<Replay>(std::move(record), std::move(script), std::move(machine));
}

}  // namespace pinion
