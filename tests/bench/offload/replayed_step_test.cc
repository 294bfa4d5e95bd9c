// Replaying a recorded step and recording the replay must give the same record.

#include "pinion/bench/offload/replayed_step.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/hooks/plan/step_recorder.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kSize = 64 * kKiB;

// Three operators, of which the second saves one object twice, and their backward. The first object
// is held by the program until the backward has begun, the last one for good.
StepTrace Step() {
  StepTrace step;
  step.objects = {{.size_bytes = kSize, .needed_until = 9, .held_until = 6},
                  {.size_bytes = 2 * kSize, .needed_until = 8, .saved_until = 2},
                  {.size_bytes = kSize / 2, .needed_until = 6},
                  {.size_bytes = kSize, .frees = false, .needed_until = 5}};
  step.accesses = {0, 1, 1, 2, 3, 2, 1, 1, 0};
  step.operators = {0, 1, 1, 2, 2, 3, 4, 4, 5};
  for (size_t i = 0; i <= step.accesses.size(); ++i) {
    step.intervals.push_back({.compute_us = 10.0 * static_cast<double>(i + 1),
                              .other_bytes = (3 + i) * kSize,
                              .transient_bytes = i % 3 * kSize});
  }
  return step;
}

class ReplayedStepTest : public ::testing::Test {
 protected:
  ReplayedStepTest() {
    EmulatedOptions options;
    options.preset.launch_us = 0;
    machine_ = EmulatedMachine::Create(options).value();
    EXPECT_THAT(RegisterEmuDevice(machine_), IsOk());
  }

  std::unique_ptr<ReplayedStep> Replay(StepTrace step) {
    return ReplayedStep::Create(std::move(step), machine_).value();
  }

  std::shared_ptr<EmulatedMachine> machine_;
};

std::shared_ptr<void> NoScope() { return nullptr; }

TEST_F(ReplayedStepTest, RecordedAgainItIsTheSameStep) {
  const StepTrace step = Step();
  const std::unique_ptr<ReplayedStep> replayed = Replay(step);
  replayed->Run(NoScope);
  const auto recorder = StepRecorder::Create(EmulatedBackend(machine_)).value();
  replayed->Run([&] { return std::make_shared<RecordScope>(recorder); });
  const StepTrace again = std::move(recorder->Finish().value()[0]);
  EXPECT_EQ(again.accesses, step.accesses);
  EXPECT_EQ(again.operators, step.operators);
  ASSERT_EQ(again.objects.size(), step.objects.size());
  for (size_t i = 0; i < step.objects.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(again.objects[i].size_bytes, step.objects[i].size_bytes);
    EXPECT_EQ(again.objects[i].frees, step.objects[i].frees);
    EXPECT_EQ(again.objects[i].saved_until, step.objects[i].saved_until);
    // An object that frees nothing stays externally referenced to the end.
    EXPECT_EQ(again.objects[i].held_until, step.objects[i].frees ? step.objects[i].held_until : 9);
  }
  // Before the last interval ends the replay has freed the tensors that the program keeps.
  for (size_t i = 0; i + 1 < step.intervals.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_NEAR(again.intervals[i].compute_us, step.intervals[i].compute_us, 0.01);
    EXPECT_EQ(again.intervals[i].other_bytes, step.intervals[i].other_bytes);
  }
}

TEST_F(ReplayedStepTest, ItsPeakAndItsTimeAreThoseOfTheRecord) {
  const StepTrace step = Step();
  const std::unique_ptr<ReplayedStep> replayed = Replay(step);
  replayed->Run(NoScope);
  machine_->ResetPeakMemory(0);
  ASSERT_THAT(machine_->SynchronizeDevice(0), IsOk());
  const double begin_ms = machine_->now_ms();
  replayed->Run(NoScope);
  ASSERT_THAT(machine_->SynchronizeDevice(0), IsOk());
  const StepPlan all = PlanStep(step, uint64_t{1} << 40, AssumedLink()).value();
  EXPECT_EQ(machine_->memory_stats(0).peak_bytes, all.peak_bytes);
  EXPECT_NEAR((machine_->now_ms() - begin_ms) * 1e3, step.compute_us(), 0.1 * step.compute_us());
}

// Records the sizes of saved and read tensors.
class NotingPacker final : public SavedTensorPacker {
 public:
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    saved.push_back(tensor.nbytes());
    return std::make_unique<Noting>(*this, tensor.detach());
  }

  std::vector<uint64_t> saved, read;

 private:
  class Noting final : public SavedTensor {
   public:
    Noting(NotingPacker& packer, at::Tensor tensor) : packer_(packer), tensor_(std::move(tensor)) {}
    at::Tensor Unpack() override {
      packer_.read.push_back(tensor_.nbytes());
      return tensor_;
    }

   private:
    NotingPacker& packer_;
    const at::Tensor tensor_;
  };
};

TEST_F(ReplayedStepTest, HooksMeetItsTensorsAndPartsOfWhatOneOperatorSavesTwice) {
  const auto packer = std::make_shared<NotingPacker>();
  Replay(Step())->Run([&] { return std::make_shared<SavedTensorScope>(packer); });
  EXPECT_THAT(packer->saved, ElementsAre(kSize, kSize, kSize, kSize / 2, kSize));
  EXPECT_THAT(packer->read, ElementsAre(kSize / 2, kSize, kSize, kSize));
}

TEST_F(ReplayedStepTest, StepsLeaveNothingBehindButWhatIsAlwaysThere) {
  const StepTrace step = Step();
  const std::unique_ptr<ReplayedStep> replayed = Replay(step);
  replayed->Run(NoScope);
  const uint64_t behind_bytes = machine_->memory_stats(0).in_use_bytes;
  replayed->Run(NoScope);
  EXPECT_EQ(machine_->memory_stats(0).in_use_bytes, behind_bytes);
  EXPECT_LE(behind_bytes, step.intervals.back().other_bytes);
}

TEST_F(ReplayedStepTest, WhatSavesInItsBackwardIsRefused) {
  StepTrace step = Step();
  step.accesses = {0, 1, 1, 2, 2, 3, 1, 1, 0};
  step.operators.clear();
  const absl::Status refused = ReplayedStep::Create(step, machine_).status();
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(refused.message(), HasSubstr("use 5"));
}

}  // namespace
}  // namespace pinion::testing
