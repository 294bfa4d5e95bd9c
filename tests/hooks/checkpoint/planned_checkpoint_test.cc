// Checks checkpoints whose recomputation is decided by the plan for a memory target.

#include <ATen/core/Tensor.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/recomputation.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/checkpoint/checkpoint.h"
#include "pinion/hooks/plan/step_recorder.h"
#include "pinion/tests/hooks/checkpoint/machine_with_link.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/random_model.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace planned_checkpoint_test {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Le;
using ::testing::SizeIs;

constexpr CheckpointOptions kIfPlanned = {.if_planned = true};
constexpr int kBlocks = 8;

// A model of two-layer blocks, each with a checkpoint around it and optionally two inside it.
class Blocks {
 public:
  explicit Blocks(c10::Device device) {
    SeedGenerators();
    x_ = at::randn({64, 64}).to(device);
    for (int i = 0; i < kBlocks; ++i) {
      in_.push_back(at::randn({64, 256}).to(device).requires_grad_(true));
      out_.push_back(at::randn({256, 64}).to(device).requires_grad_(true));
    }
  }

  // Runs forward; null `options` mean no checkpoints.
  at::Tensor Loss(const CheckpointOptions* options) {
    at::Tensor x = x_;
    for (size_t i = 0; i < used_; ++i) {
      const auto block = [this, i](const at::Tensor& input) {
        ++runs_[i];
        if (throws_at_ >= 0 && throws_at_-- == 0) throw std::runtime_error("no such block");
        const at::Tensor scaled = scales_inputs_ ? input.mul(0.5) : input;
        const auto widen = [this, i](const at::Tensor& in) {
          ++part_runs_;
          return at::gelu(at::matmul(in, in_[i]));
        };
        const auto narrow = [this, i](const at::Tensor& wide) {
          ++part_runs_;
          return at::matmul(wide, out_[i]);
        };
        const at::Tensor made =
            in_parts_ ? checkpoint(kIfPlanned, narrow, checkpoint(kIfPlanned, widen, scaled))
                      : narrow(widen(scaled));
        return made.mul(0.01).add(input).sin();
      };
      x = options == nullptr ? block(x) : checkpoint(*options, block, x);
    }
    return x.sum();
  }

  Gradients Take(const at::Tensor& loss) {
    Gradients gradients = {loss.detach().cpu(), {}};
    for (const auto* parameters : {&in_, &out_}) {
      for (const at::Tensor& parameter : *parameters) {
        if (!parameter.grad().defined()) continue;
        gradients.parameters.push_back(parameter.grad().cpu());
        parameter.mutable_grad().reset();
      }
    }
    return gradients;
  }

  // Resets gradients and counts.
  void Reset() {
    Take(at::zeros({}));
    TakeRuns();
    TakePartRuns();
  }

  void set_input(const at::Tensor& x) { x_ = x; }
  // With scaling, no operator saves a block's input itself.
  void set_scales_inputs(bool scales) { scales_inputs_ = scales; }
  void set_in_parts(bool in_parts) { in_parts_ = in_parts; }
  bool in_parts() const { return in_parts_; }
  // Uses only the first `blocks` blocks.
  void set_used(int blocks) { used_ = static_cast<size_t>(blocks); }
  // Throws when `throws_at` blocks have run, in forward or backward; -1: never.
  void set_throws_at(int throws_at) { throws_at_ = throws_at; }

  // Returns the runs of all halves since the last call.
  int TakePartRuns() { return std::exchange(part_runs_, 0); }
  // Returns the runs by block since the last call.
  std::vector<int> TakeRuns() {
    return std::exchange(runs_, std::vector<int>(static_cast<size_t>(kBlocks)));
  }

 private:
  at::Tensor x_;
  std::vector<at::Tensor> in_, out_;
  bool scales_inputs_ = false;
  bool in_parts_ = false;
  int part_runs_ = 0;
  size_t used_ = kBlocks;
  int throws_at_ = -1;
  std::vector<int> runs_ = std::vector<int>(static_cast<size_t>(kBlocks));
};

struct Ran {
  Gradients gradients;
  std::vector<int> runs;  // by block
  int part_runs = 0;
  uint64_t peak_bytes = 0;
  double ms = 0;  // modelled
};

constexpr double kSlowLink = 0.5;
constexpr double kQuickLink = 500;

// Blocks on a machine with a link, and the session that offloads their activations.
class Training {
 public:
  // The session has windows.
  Training() : Training(MachineWithLink(kSlowLink), SmallWindows()) {}
  // The session has a memory target.
  explicit Training(uint64_t target_bytes, double gb_per_s = kSlowLink)
      : Training(MachineWithLink(gb_per_s), TargetBesideLink(target_bytes, gb_per_s)) {
    target_bytes_ = target_bytes;
  }

  // Leaves the device no more memory than the target.
  void LimitMemory() { EXPECT_THAT(world.machine().SetMemoryLimit(0, target_bytes_), IsOk()); }

  // Null `options` mean no checkpoints, a null session no offload.
  Ran Step(const CheckpointOptions* options, const std::shared_ptr<OffloadSession>& session,
           bool takes_gradients = true) {
    EXPECT_THAT(world.Synchronize(), IsOk());
    world.ResetPeak();
    const double begin_ms = world.machine().now_ms();
    Ran ran;
    at::Tensor loss;
    {
      std::optional<OffloadScope> scope;
      if (session != nullptr) scope.emplace(session);
      loss = blocks.Loss(options);
    }
    loss.backward();
    EXPECT_THAT(world.Synchronize(), IsOk());
    ran.ms = world.machine().now_ms() - begin_ms;
    ran.peak_bytes = world.peak_device_bytes();
    if (takes_gradients) ran.gradients = blocks.Take(loss);
    ran.runs = blocks.TakeRuns();
    ran.part_runs = blocks.TakePartRuns();
    return ran;
  }
  Ran PlainStep() { return Step(nullptr, nullptr); }
  // The step with all segments kept.
  Ran KeptStep() { return Step(nullptr, world.session()); }
  // Expects the gradients, and a peak within the target.
  Ran PlannedStep(const Gradients& expected) {
    Ran step = Step(&kIfPlanned, world.session());
    ExpectSameGradients(expected, step.gradients);
    EXPECT_LE(step.peak_bytes, target_bytes_);
    return step;
  }
  // Runs steps until the step has a plan, and returns what the plan decided.
  Ran KnownStep(const Gradients& expected) {
    for (int i = 0; i < 5; ++i) PlannedStep(expected);
    return PlannedStep(expected);
  }
  // Runs three micro-batches, which accumulate gradients. The peak covers all three.
  Ran MicroBatches(const CheckpointOptions* options,
                   const std::shared_ptr<OffloadSession>& session) {
    Ran batch;
    for (int i = 0; i < 3; ++i) {
      Ran micro = Step(options, session, /*takes_gradients=*/i == 2);
      micro.peak_bytes = std::max(micro.peak_bytes, batch.peak_bytes);
      batch.runs.insert(batch.runs.end(), micro.runs.begin(), micro.runs.end());
      micro.runs = std::move(batch.runs);
      batch = std::move(micro);
    }
    return batch;
  }

  EmuWorld world;
  Blocks blocks{world.device()};

 private:
  Training(const EmulatedOptions& machine, const OffloadOptions& offload)
      : world(machine, offload) {}

  uint64_t target_bytes_ = UINT64_MAX;
};

// The step without offload, and the peak with all saved tensors offloaded.
struct Bounds {
  explicit Bounds(double gb_per_s = kSlowLink) {
    {
      Training training(1, gb_per_s);
      training.PlainStep();  // fills the allocator's cache
      plain = training.PlainStep();
    }
    least_bytes = Training(1, gb_per_s).KeptStep().peak_bytes;
  }
  // Returns a target between the two peaks.
  uint64_t TargetBytes(int percent) const {
    return least_bytes + (plain.peak_bytes - least_bytes) * percent / 100;
  }

  Ran plain;
  uint64_t least_bytes = 0;
};

int Sum(const std::vector<int>& runs) { return std::accumulate(runs.begin(), runs.end(), 0); }

TEST(PlannedCheckpoint, WhereTheLinkIsSlowSomeAreComputedAgainAndTheStepIsShorter) {
  const Bounds bounds;
  const Gradients& expected = bounds.plain.gradients;
  for (const int percent : {80, 60, 40, 20}) {
    SCOPED_TRACE(percent);
    const uint64_t target_bytes = bounds.TargetBytes(percent);
    Ran alone;
    {
      Training kept(target_bytes);
      for (int i = 0; i < 6; ++i) alone = kept.KeptStep();
    }
    Training training(target_bytes);
    training.LimitMemory();
    EXPECT_THAT(training.PlannedStep(expected).runs, Each(1))
        << "a step that nobody knows keeps what it saves";
    const Ran step = training.KnownStep(expected);
    EXPECT_GT(Sum(step.runs), kBlocks);
    EXPECT_THAT(step.runs, Each(AllOf(Ge(1), Le(2))));
    EXPECT_LT(step.ms, alone.ms);
    EXPECT_EQ(training.PlannedStep(expected).runs, step.runs);
    EXPECT_THAT(training.world.session()->Explain(0), HasSubstr("segments recomputed: "));
    training.world.ExpectNothingLeft();
  }
}

TEST(PlannedCheckpoint, WhereTheLinkHidesTheCopiesNothingIsComputedAgain) {
  const Bounds bounds(kQuickLink);
  Training training(bounds.TargetBytes(50), kQuickLink);
  for (int i = 0; i < 5; ++i) {
    EXPECT_THAT(training.PlannedStep(bounds.plain.gradients).runs, Each(1));
  }
  EXPECT_GT(training.world.session()->GetStats().fetched_bytes, 0u);
}

TEST(PlannedCheckpoint, OneThatNoPlanMayDecideOnIsComputedAgain) {
  const Bounds bounds(kQuickLink);
  Training training(bounds.TargetBytes(50), kQuickLink);
  const CheckpointOptions always;
  for (int i = 0; i < 5; ++i) {
    const Ran step = training.Step(&always, training.world.session());
    ExpectSameGradients(bounds.plain.gradients, step.gradients);
    EXPECT_THAT(step.runs, Each(2));
  }
}

TEST(PlannedCheckpoint, WithoutAPlanEachIsComputedAgain) {
  Training training;
  const Ran plain = training.PlainStep();
  for (const auto& session : {std::shared_ptr<OffloadSession>(), training.world.session()}) {
    for (int i = 0; i < 3; ++i) {
      const Ran step = training.Step(&kIfPlanned, session);
      ExpectSameGradients(plain.gradients, step.gradients);
      EXPECT_THAT(step.runs, Each(2));
    }
  }
}

TEST(PlannedCheckpoint, ForMemoryThatCostsNoTimeNothingIsComputedAgain) {
  const Bounds bounds;
  Training training(OffloadOptions::kAutoTarget);
  EXPECT_THAT(training.KnownStep(bounds.plain.gradients).runs, Each(1));
}

TEST(PlannedCheckpoint, StepsThatBeginAlikeAndThenDifferKeepTheirBitsAndTheirTarget) {
  const Bounds bounds;
  const Gradients half = [] {
    Training training;
    training.blocks.set_used(kBlocks / 2);
    return training.PlainStep().gradients;
  }();
  Training training(bounds.TargetBytes(60));
  int again = 0;
  for (int i = 0; i < 24; ++i) {
    SCOPED_TRACE(i);
    // The whole model has a recomputation plan before the first half-sized step.
    const bool is_half = i >= 6 && i % 2 == 0;
    training.blocks.set_used(is_half ? kBlocks / 2 : kBlocks);
    const Ran step = training.PlannedStep(is_half ? half : bounds.plain.gradients);
    if (i < 6) again = Sum(step.runs) - kBlocks;
  }
  EXPECT_GT(again, 0);
  EXPECT_GT(training.world.session()->GetStats().kept_as_planned, 0u);
}

TEST(PlannedCheckpoint, MicroBatchesThatAddToGradientsKeepTheirBitsAndTheirTarget) {
  const auto run_alone = [](bool offloads) {
    Training training(1);
    training.MicroBatches(nullptr, nullptr);  // fills the allocator's cache
    return training.MicroBatches(nullptr, offloads ? training.world.session() : nullptr);
  };
  const Ran plain = run_alone(/*offloads=*/false);
  const uint64_t least_bytes = run_alone(/*offloads=*/true).peak_bytes;
  const uint64_t target_bytes = least_bytes + (plain.peak_bytes - least_bytes) * 6 / 10;
  Training training(target_bytes);
  training.LimitMemory();
  Ran batch;
  for (int i = 0; i < 8; ++i) {
    SCOPED_TRACE(i);
    batch = training.MicroBatches(&kIfPlanned, training.world.session());
    ExpectSameGradients(plain.gradients, batch.gradients);
    EXPECT_LE(batch.peak_bytes, target_bytes);
  }
  EXPECT_GT(Sum(batch.runs), 3 * kBlocks) << "some segments are computed again";
  EXPECT_EQ(training.world.session()->GetStats().steps_over_target, 0u);
  EXPECT_THAT(training.world.session()->Explain(0), HasSubstr("adds to gradients"));
  training.world.ExpectNothingLeft();
}

// The step begins with a segment, whose placement is decided before the kind of step is known.
TEST(PlannedCheckpoint, StepsOfTwoKindsKeepTheirBitsAndTheirTargetInWhateverOrderTheyCome) {
  const Bounds bounds;
  const at::Tensor host[] = {at::randn({64, 64}), at::randn({48, 64})};
  const uint64_t more_bytes = host[1].nbytes();  // more than in the measured step
  Training training(bounds.TargetBytes(40) + more_bytes);
  std::vector<at::Tensor> inputs;
  std::vector<Gradients> expected;
  for (const at::Tensor& input : host) {
    inputs.push_back(input.to(training.world.device()));
    training.blocks.set_input(inputs.back());
    expected.push_back(training.PlainStep().gradients);
  }
  // Each kind alone, then in turns, then in random order.
  std::vector<size_t> order(6, 0);
  order.insert(order.end(), 6, 1);
  for (size_t i = 0; i < 12; ++i) order.push_back(i % 2);
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i) order.push_back(random() % 2);
  std::vector<int> runs_of_first_block;
  for (size_t i = 0; i < order.size(); ++i) {
    SCOPED_TRACE(i);
    training.blocks.set_input(inputs[order[i]]);
    runs_of_first_block.push_back(training.PlannedStep(expected[order[i]]).runs[0]);
  }
  EXPECT_EQ(runs_of_first_block[5], 2) << "one kind alone is known";
  EXPECT_EQ(runs_of_first_block.back(), 1) << "kept, since it was not known which kind comes";
  training.world.ExpectNothingLeft();
}

// The trial of its plan begins with the save of such an input, and must match the recorded step.
TEST(PlannedCheckpoint, AStepMayBeginWithASegmentWhoseInputTheSessionMovesThoughItIsSmall) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "cuBLAS holds more than the blocks";
  OffloadOptions options = TargetBesideLink(0, kSlowLink);
  options.min_offload_bytes = 1;
  std::vector<int> runs;
  const auto run_steps = [&](uint64_t target_bytes) {
    options.memory_target_bytes = target_bytes;
    EmuWorld world(MachineWithLink(kSlowLink), options);
    const at::Tensor x = at::randn({1, 64}).to(world.device());
    std::vector<at::Tensor> columns;
    for (int i = 0; i < kBlocks; ++i) {
      columns.push_back(at::randn({512, 1}).to(world.device()).requires_grad_(true));
    }
    uint64_t peak_bytes = 0;
    for (int step = 0; step < 7; ++step) {
      runs.assign(kBlocks, 0);
      EXPECT_THAT(world.Synchronize(), IsOk());
      world.ResetPeak();
      at::Tensor y = x;
      {
        const OffloadScope scope(world.session());
        for (size_t i = 0; i < kBlocks; ++i) {
          const auto block = [&, i](const at::Tensor& in) {
            ++runs[i];
            return at::matmul(columns[i], in.mul(0.5)).sin().cos().exp().mean(0, /*keepdim=*/true);
          };
          y = checkpoint(kIfPlanned, block, y);
        }
      }
      y.sum().backward();
      for (at::Tensor& column : columns) column.mutable_grad().reset();
      peak_bytes = std::max(peak_bytes, world.peak_device_bytes());
    }
    return peak_bytes;
  };
  const uint64_t least_bytes = run_steps(1);
  run_steps(2 * least_bytes);
  EXPECT_EQ(runs[0], 2) << ::testing::PrintToString(runs) << ", least " << least_bytes;
}

TEST(PlannedCheckpoint, AnInnerSegmentOfOneThatIsKeptIsKept) {
  EmuWorld world(MachineWithLink(kQuickLink), TargetBesideLink(uint64_t{1} << 40, kQuickLink));
  const at::Tensor x = at::randn({64, 64}).to(world.device()).requires_grad_(true);
  int inner_runs = 0;
  for (int i = 0; i < 5; ++i) {
    at::Tensor y;
    {
      const OffloadScope scope(world.session());
      const at::Tensor first = x.sin();  // the first save of the step
      y = checkpoint(
          kIfPlanned,
          [&inner_runs](const at::Tensor& outer) {
            const auto inner = [&inner_runs](const at::Tensor& in) {
              ++inner_runs;
              return in.sin();
            };
            return checkpoint(kIfPlanned, inner, outer.cos());
          },
          first);
    }
    y.sum().backward();
  }
  EXPECT_EQ(inner_runs, 5);
}

// No plan keeps what a backward saves.
TEST(PlannedCheckpoint, ASegmentOfABackwardIsComputedAgainInAScopeAsWell) {
  Training training(kMiB);
  const at::Tensor weight = at::randn({64, 64}).to(training.world.device()).requires_grad_(true);
  int runs = 0;
  const auto segment = [&runs](const at::Tensor& input) {
    ++runs;
    return input.sin();
  };
  const at::Tensor y = Probe(weight, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
    const at::AutoGradMode grad_mode(true);
    const OffloadScope scope(training.world.session());
    checkpoint(kIfPlanned, segment, weight).sum().backward();
    return grad;
  });
  y.sum().backward();
  EXPECT_EQ(runs, 2);
}

TEST(PlannedCheckpoint, WithoutAPlanWhatIsInsideOfASegmentIsPartOfIt) {
  Training training;
  const Ran plain = training.PlainStep();
  training.blocks.set_in_parts(true);
  for (const auto& session : {std::shared_ptr<OffloadSession>(), training.world.session()}) {
    const Ran step = training.Step(&kIfPlanned, session);
    ExpectSameGradients(plain.gradients, step.gradients);
    EXPECT_THAT(step.runs, Each(2));
    EXPECT_EQ(step.part_runs, 2 * 2 * kBlocks) << "not once more for themselves";
  }
}

// Within an ordinary checkpoint it is an independent checkpoint.
TEST(PlannedCheckpoint, InsideOfACheckpointThatNoPlanDecidesOnItIsComputedAgainByItself) {
  Training training;
  const Ran plain = training.PlainStep();
  training.blocks.set_in_parts(true);
  const CheckpointOptions ordinary;
  const Ran step = training.Step(&ordinary, training.world.session());
  ExpectSameGradients(plain.gradients, step.gradients);
  EXPECT_THAT(step.runs, Each(2));
  EXPECT_GT(step.part_runs, 2 * 2 * kBlocks);
}

TEST(PlannedCheckpoint, WithPartsTheStepIsNoLongerThanWithWholesAloneAndMayBeShorter) {
  const Bounds bounds;
  bool some_shorter = false;
  for (const int percent : {5, 10, 20, 40, 60, 80}) {
    SCOPED_TRACE(percent);
    const auto known_step = [&](bool in_parts) {
      Training training(bounds.TargetBytes(percent));
      training.blocks.set_in_parts(in_parts);
      training.LimitMemory();
      training.PlannedStep(bounds.plain.gradients);
      Ran step = training.KnownStep(bounds.plain.gradients);
      training.world.ExpectNothingLeft();
      return step;
    };
    const Ran whole = known_step(/*in_parts=*/false), parts = known_step(/*in_parts=*/true);
    EXPECT_LE(parts.ms, 1.01 * whole.ms);
    some_shorter = some_shorter || parts.ms < 0.97 * whole.ms;
    // Recomputed whole blocks also run their parts.
    const int of_wholes = Sum(parts.runs) - kBlocks;
    EXPECT_GT(parts.part_runs, 2 * (kBlocks + of_wholes)) << "some parts alone are";
  }
  EXPECT_TRUE(some_shorter);
}

TEST(PlannedCheckpoint, ASegmentThatThrowsLeavesNothingBehind) {
  const Bounds bounds;
  for (const bool in_parts : {false, true}) {
    SCOPED_TRACE(in_parts);
    Training training(bounds.TargetBytes(60));
    training.blocks.set_in_parts(in_parts);
    // Throws in forward and in the recomputation of a segment.
    for (const int throws_at : {0, 3, kBlocks - 1, kBlocks}) {
      SCOPED_TRACE(throws_at);
      const Ran known = training.KnownStep(bounds.plain.gradients);
      EXPECT_GT(known.part_runs, 2 * kBlocks) << "something is computed again";
      if (throws_at >= Sum(known.runs)) continue;  // only parts are recomputed
      training.blocks.set_throws_at(throws_at);
      EXPECT_THROW(training.Step(&kIfPlanned, training.world.session()), std::runtime_error);
      training.blocks.Reset();
    }
    training.world.ExpectNothingLeft();
  }
}

// Keeps all tensors, and tells the recorder which segments are kept and which are recomputed.
class KeepsSegments : public SavedTensorPacker {
 public:
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    return KeepTensor(tensor);
  }
  std::optional<uint32_t> KeepSegment(const SegmentBegin&) override {
    const uint32_t ordinal = segments_++;
    if (std::find(again_.begin(), again_.end(), ordinal) == again_.end()) return ordinal;
    // Segments inside a recomputed one do not begin.
    if (ordinal % (parts_ + 1) == 0) segments_ += parts_;
    return std::nullopt;
  }
  // `again` are the recomputed segments; each outer segment has `parts` segments inside.
  KeepsSegments(std::vector<uint32_t> again, uint32_t parts)
      : again_(std::move(again)), parts_(parts) {}

 private:
  const std::vector<uint32_t> again_;
  const uint32_t parts_;
  uint32_t segments_ = 0;
};

StepTrace Record(Training& training, const std::vector<uint32_t>& again,
                 const CheckpointOptions* options = &kIfPlanned) {
  training.PlainStep();
  const auto recorder = StepRecorder::Create(training.world.backend()).value();
  Blocks& blocks = training.blocks;
  at::Tensor loss;
  {
    const RecordScope record(recorder);
    const SavedTensorScope scope(std::make_shared<KeepsSegments>(again, blocks.in_parts() ? 2 : 0));
    loss = blocks.Loss(options);
  }
  loss.backward();
  StepTrace step = recorder->Finish().value().at(0);
  blocks.Take(loss);
  EXPECT_THAT(step.Validate(), IsOk());
  return step;
}

TEST(PlannedCheckpoint, ARecordTellsWhatEachSegmentSavesAndNeeds) {
  Training training;
  const StepTrace step = Record(training, {});
  ASSERT_EQ(step.segments.size(), static_cast<size_t>(kBlocks));
  EXPECT_THAT(RecomputableSegments(step), SizeIs(kBlocks));
  for (const StepSegment& segment : step.segments) {
    ASSERT_THAT(segment.inputs, SizeIs(1));
    EXPECT_EQ(segment.inputs[0], step.accesses[segment.accesses[0]])
        << "its first operator saves its input";
  }
  EXPECT_THAT(step.unsaved_inputs, IsEmpty());
}

TEST(PlannedCheckpoint, ARecordTellsOfInputsThatNobodySaves) {
  Training training;
  training.blocks.set_scales_inputs(true);
  const StepTrace step = Record(training, {});
  ASSERT_THAT(step.unsaved_inputs, SizeIs(kBlocks));
  for (uint32_t i = 0; i < kBlocks; ++i) {
    SCOPED_TRACE(i);
    EXPECT_THAT(step.segments[i].inputs, ElementsAre(step.objects.size() + i));
    const StepObject& input = step.unsaved_inputs[i];
    EXPECT_EQ(input.size_bytes, 64 * 64 * sizeof(float));
    EXPECT_EQ(input.frees, i > 0) << "the program has its own to the end";
    if (i == 0) continue;
    EXPECT_GT(input.held_until, step.segments[i].accesses[0]);
    if (i + 1 < kBlocks) {
      EXPECT_LE(input.held_until, step.segments[i + 1].accesses[0]);
    }
  }
}

// The same operators run with and without segments.
TEST(PlannedCheckpoint, ARecordOfSegmentsThatAreKeptIsThatOfTheStepWithoutThem) {
  Training training;
  for (const bool scales : {false, true}) {
    SCOPED_TRACE(scales);
    training.blocks.set_scales_inputs(scales);
    const StepTrace kept = Record(training, {});
    const StepTrace plain = Record(training, {}, nullptr);
    EXPECT_EQ(kept.accesses, plain.accesses);
    EXPECT_EQ(kept.operators, plain.operators);
    EXPECT_NEAR(kept.compute_us(), plain.compute_us(), 0.001 * plain.compute_us());
    ASSERT_EQ(kept.objects.size(), plain.objects.size());
    for (size_t i = 0; i < kept.objects.size(); ++i) {
      EXPECT_EQ(kept.objects[i].size_bytes, plain.objects[i].size_bytes);
      EXPECT_EQ(kept.objects[i].signature, plain.objects[i].signature);
    }
    EXPECT_EQ(LeastMemoryBytes(kept).value(), LeastMemoryBytes(plain).value());
  }
}

// A segment without input on the device is not recorded, and remains an ordinary checkpoint.
TEST(PlannedCheckpoint, InsideOfAWholeWhatNoPlanDecidesOnStaysACheckpoint) {
  EmuWorld world;
  const at::Tensor x = at::randn({64, 64}).to(world.device()).requires_grad_(true);
  int runs = 0;
  const auto outer = [&](const at::Tensor& in) {
    const auto inner = [&runs, in](int times) {
      ++runs;
      return in.mul(times).sin();
    };
    return checkpoint(kIfPlanned, inner, 2).cos();
  };
  checkpoint(kIfPlanned, outer, x).sum().backward();
  EXPECT_EQ(runs, 3) << "in forward, in the second run of the outer one, and by itself";
}

// Tensors that an inner scope packs do not belong to the segment, which cannot discard them.
TEST(PlannedCheckpoint, WhatAScopeWithinASegmentPacksIsInNoSegment) {
  EmuWorld world(MachineWithLink(kSlowLink));
  const at::Tensor x = at::randn({64, 64}).to(world.device()).requires_grad_(true);
  const auto recorder = StepRecorder::Create(world.backend()).value();
  {
    const RecordScope record(recorder);
    const SavedTensorScope scope(std::make_shared<KeepsSegments>(std::vector<uint32_t>(), 0));
    const auto outer = [](const at::Tensor& in) {
      const at::Tensor first = in.sin();
      const SavedTensorScope within(std::make_shared<KeepsSegments>(std::vector<uint32_t>{0}, 0));
      return first.cos();
    };
    checkpoint(kIfPlanned, outer, x.exp()).sum().backward();
  }
  const StepTrace step = recorder->Finish().value().at(0);
  ASSERT_THAT(step.Validate(), IsOk());
  ASSERT_THAT(step.segments, SizeIs(1));
  // exp's output (sin saves it too) and sin's output, which cos saves.
  EXPECT_THAT(step.objects, SizeIs(2));
  for (const uint32_t use : step.segments[0].accesses) EXPECT_EQ(step.accesses[use], 0u);
}

TEST(PlannedCheckpoint, ARecordTellsWhichSegmentsAreInsideOfOthers) {
  Training training;
  const StepTrace plain = Record(training, {});
  training.blocks.set_in_parts(true);
  const StepTrace step = Record(training, {});
  EXPECT_EQ(step.accesses, plain.accesses);
  ASSERT_THAT(step.segments, SizeIs(3 * kBlocks));
  for (uint32_t i = 0; i < kBlocks; ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(step.segments[3 * i].outer, std::nullopt);
    EXPECT_EQ(step.segments[3 * i].accesses, plain.segments[i].accesses);
    EXPECT_EQ(step.segments[3 * i + 1].outer, 3 * i);
    EXPECT_EQ(step.segments[3 * i + 2].outer, 3 * i);
    // The first half saves its input and what gelu takes, the second its input alone.
    EXPECT_THAT(step.segments[3 * i + 1].accesses, SizeIs(4));
    EXPECT_THAT(step.segments[3 * i + 2].accesses, SizeIs(2));
  }
  std::vector<uint32_t> useful;
  for (uint32_t i = 0; i < 3 * kBlocks; ++i) {
    if (i % 3 != 2) useful.push_back(i);
  }
  EXPECT_EQ(RecomputableSegments(step), useful) << "what saves its inputs alone saves no memory";
}

// The step with segments computed again as it is foreseen, and what that step then is.
void ExpectAsForeseen(const StepTrace& foreseen, const StepTrace& real) {
  ASSERT_THAT(foreseen.Validate(), IsOk());
  ASSERT_EQ(foreseen.accesses, real.accesses);
  EXPECT_EQ(foreseen.operators, real.operators);
  // In each interval, with all there.
  const std::vector<int64_t> foreseen_all = DeviceBytes(foreseen, {});
  const std::vector<int64_t> real_all = DeviceBytes(real, {});
  for (size_t i = 0; i < real_all.size(); ++i) {
    EXPECT_GE(foreseen_all[i], real_all[i]) << "interval " << i;
    EXPECT_LE(foreseen_all[i], real_all[i] * 11 / 10) << "interval " << i;
    EXPECT_GE(foreseen.intervals[i].other_bytes, real.intervals[i].other_bytes) << i;
  }
  EXPECT_NEAR(foreseen.compute_us(), real.compute_us(), 0.02 * real.compute_us());
  const uint64_t foreseen_bytes = LeastMemoryBytes(foreseen).value();
  const uint64_t real_bytes = LeastMemoryBytes(real).value();
  EXPECT_GE(foreseen_bytes, real_bytes);
  EXPECT_LE(foreseen_bytes, real_bytes * 11 / 10);
  const StepPlan all = PlanStep(foreseen, UINT64_MAX / 2, *SmallWindows().link).value();
  const StepPlan all_real = PlanStep(real, UINT64_MAX / 2, *SmallWindows().link).value();
  EXPECT_GE(all.peak_bytes, all_real.peak_bytes);
  EXPECT_LE(all.peak_bytes, all_real.peak_bytes * 11 / 10);
}

void ExpectStepsAsForeseen(Training& training, const std::vector<std::vector<uint32_t>>& choices) {
  for (const bool scales : {false, true}) {
    training.blocks.set_scales_inputs(scales);
    const StepTrace kept = Record(training, {});
    for (const std::vector<uint32_t>& again : choices) {
      SCOPED_TRACE(::testing::PrintToString(again) + (scales ? ", scaled" : ""));
      ExpectAsForeseen(WithRecomputation(kept, again), Record(training, again));
    }
  }
}

TEST(PlannedCheckpoint, AStepWithSegmentsComputedAgainIsAsWasForeseen) {
  Training training;
  ExpectStepsAsForeseen(training, {{0}, {3}, {7}, {1, 2, 6}, {0, 1, 2, 3, 4, 5, 6, 7}});
}

TEST(PlannedCheckpoint, AStepWithPartsOfSegmentsComputedAgainIsAsWasForeseen) {
  Training training;
  training.blocks.set_in_parts(true);
  ExpectStepsAsForeseen(training, {{1}, {0}, {1, 3, 22}, {0, 4, 10, 21}});
}

// Gradients of each step of a random model, and the peak over all steps.
struct RandomRun {
  std::vector<Gradients> gradients;
  uint64_t peak_bytes = 0;
  uint64_t runs = 0;  // segment runs
};

constexpr int kRounds = 5;

RandomRun RunModel(const RandomModel& model, std::optional<uint64_t> target_bytes, int rounds,
                   bool nested = false) {
  EmuWorld world(MachineWithLink(kSlowLink), TargetBesideLink(target_bytes.value_or(1), kSlowLink));
  RandomNet net(model, world.device());
  RandomRun run;
  if (target_bytes.has_value()) {
    net.set_checkpointing([&run, nested](const RandomNet::Layers& layers, at::Tensor x) {
      const auto counted = [&run, layers](const at::Tensor& input) {
        ++run.runs;
        return layers(input);
      };
      // Saves more than the segment inside it, with the same bits and gradients.
      const auto outer = [counted](const at::Tensor& input) {
        const at::Tensor made = checkpoint(kIfPlanned, counted, input);
        return at::maximum(made, made);
      };
      return nested ? checkpoint(kIfPlanned, outer, std::move(x))
                    : checkpoint(kIfPlanned, counted, std::move(x));
    });
  }
  for (int round = 0; round < rounds; ++round) {
    for (const RandomModel::Step& step : model.steps) {
      EXPECT_THAT(world.Synchronize(), IsOk());
      world.ResetPeak();
      run.gradients.push_back(net.Step(step, target_bytes.has_value() ? world.session() : nullptr));
      run.peak_bytes = std::max(run.peak_bytes, world.peak_device_bytes());
    }
  }
  return run;
}

TEST(PlannedCheckpoint, RandomModelsHaveTheirBitsAndKeepWithinTheirTarget) {
  constexpr uint64_t kModels = 100;
  uint64_t mixed = 0;
  for (uint64_t seed = 1; seed <= kModels; ++seed) {
    SCOPED_TRACE(::testing::Message() << "model " << seed);
    const RandomModel model = RandomModel::Draw(seed);
    const RandomRun plain = RunModel(model, std::nullopt, kRounds);
    const RandomRun least = RunModel(model, 1, 1, /*nested=*/seed % 2 == 0);
    const uint64_t target_bytes = (plain.peak_bytes + least.peak_bytes) / 2;
    const RandomRun planned = RunModel(model, target_bytes, kRounds, /*nested=*/seed % 2 == 0);
    EXPECT_LE(planned.peak_bytes, std::max(target_bytes, least.peak_bytes));
    ASSERT_EQ(planned.gradients.size(), plain.gradients.size());
    for (size_t i = 0; i < plain.gradients.size(); ++i) {
      ExpectSameGradients(plain.gradients[i], planned.gradients[i]);
    }
    mixed += planned.runs > least.runs * kRounds ? 1 : 0;
    if (HasFailure()) return;
  }
  // On a GPU, launching such operators takes longer than fetching their inputs.
  if (!TestsRunOnGpu()) {
    EXPECT_GT(mixed, kModels / 4);
  }
}

}  // namespace planned_checkpoint_test
}  // namespace pinion::testing
