// Whole training runs in this process, on the emulated accelerator.

#include "pinion/examples/training_run.h"

#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/examples/text_data.h"
#include "pinion/programs/gpt_config.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace training_run_test {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TextData Text() {
  std::string contents;
  for (int i = 0; i < 400; ++i) {
    contents += "the quick brown fox jumps over the lazy dog " + std::to_string(i * i) + "\n";
  }
  return *TextData::Create(contents);
}

RunOptions Tiny(OffloadMode offload) {
  RunOptions options;
  options.model = *FindGptSize("tiny");
  options.model.vocabulary = Text().vocabulary();
  options.steps = 5;
  options.offload = offload;
  options.preset = ScaledDeviceFor(options.model)->preset;
  return options;
}

std::vector<float> Losses(const RunOptions& options) {
  const absl::StatusOr<RunResult> result = Train(options, Text(), nullptr);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? result->losses : std::vector<float>();
}

TEST(Train, OffloadedLossesHaveTheBitsOfThoseWithout) {
  const std::vector<float> expected = Losses(Tiny(OffloadMode::kNone));
  ASSERT_EQ(expected.size(), 5);
  EXPECT_LT(expected.back(), expected.front());
  EXPECT_EQ(Losses(Tiny(OffloadMode::kBlocking)), expected);
  EXPECT_EQ(Losses(Tiny(OffloadMode::kPinion)), expected);
}

TEST(Train, OffloadedDropoutDrawsTheSameMasksComputedAgainOrNot) {
  RunOptions none = Tiny(OffloadMode::kNone);
  none.model.dropout = 0.2;
  RunOptions pinion = Tiny(OffloadMode::kPinion);
  pinion.model.dropout = 0.2;
  const std::vector<float> expected = Losses(none);
  EXPECT_NE(expected, Losses(Tiny(OffloadMode::kNone)));
  EXPECT_EQ(Losses(pinion), expected);
  for (RunOptions* checkpointed : {&none, &pinion}) {
    checkpointed->model.checkpoint_blocks = true;
    EXPECT_EQ(Losses(*checkpointed), expected);
  }
}

TEST(Train, BFloat16TrainsAndOffloadsToTheSameBits) {
  RunOptions none = Tiny(OffloadMode::kNone);
  none.model.bfloat16 = true;
  RunOptions pinion = Tiny(OffloadMode::kPinion);
  pinion.model.bfloat16 = true;
  EXPECT_EQ(Losses(pinion), Losses(none));
}

// The scenario of the default command: the memory limit is below the model's need.
TEST(Train, UnderALimitOnlyTheOffloadedRunCompletesAndItsLossIsTheUnlimitedOne) {
  const std::vector<float> expected = Losses(Tiny(OffloadMode::kNone));

  RunOptions limited = Tiny(OffloadMode::kNone);
  limited.device_memory_bytes = PersistentBytes(limited.model) + SavedBytes(limited.model) / 2;
  const absl::StatusOr<RunResult> without = Train(limited, Text(), nullptr);
  ASSERT_EQ(without.status().code(), absl::StatusCode::kResourceExhausted) << without.status();
  const std::string message(without.status().message());
  EXPECT_THAT(message, StartsWith("emu:0 ran out of memory in step 1 with --offload=none"));
  EXPECT_THAT(message, HasSubstr("--offload=pinion"));
  EXPECT_THAT(message, HasSubstr("parameters"));
  EXPECT_THAT(message, HasSubstr("gradients"));
  EXPECT_THAT(message, HasSubstr("optimizer state"));

  limited.offload = OffloadMode::kPinion;
  EXPECT_EQ(Losses(limited), expected);
}

// The parameters alone exceed the device's memory, so activation offload is not enough.
TEST(Train, StreamedWeightsTrainAModelThatTheDeviceCannotHold) {
  RunOptions options = Tiny(OffloadMode::kNone);
  options.model.layers = 12;
  options.model.width = 128;
  options.for_comparison = true;
  const absl::StatusOr<RunResult> expected = Train(options, Text(), nullptr);
  ASSERT_TRUE(expected.ok()) << expected.status();

  options.offload = OffloadMode::kPinion;
  options.offload_weights = true;
  const uint64_t parameter_bytes = ParameterCount(options.model) * sizeof(float);
  options.device_memory_bytes = parameter_bytes * 9 / 10;
  const absl::StatusOr<RunResult> streamed = Train(options, Text(), nullptr);
  ASSERT_TRUE(streamed.ok()) << streamed.status();
  EXPECT_EQ(streamed->losses, expected->losses);
  EXPECT_EQ(streamed->gradient_fingerprints, expected->gradient_fingerprints);
  EXPECT_LT(streamed->peak_device_bytes, parameter_bytes);
  EXPECT_GE(expected->peak_device_bytes, 4 * parameter_bytes);
  EXPECT_FALSE(streamed->peak_activation_bytes.has_value()) << "weights are a part of the peak";

  options.offload_weights = false;
  options.device_memory_bytes = UINT64_MAX;
  const absl::StatusOr<RunResult> resident = Train(options, Text(), nullptr);
  ASSERT_TRUE(resident.ok()) << resident.status();
  EXPECT_LE(streamed->peak_device_bytes,
            streamed->two_layers_bytes + *resident->peak_activation_bytes);
  EXPECT_GT(streamed->two_layers_bytes, 4 * parameter_bytes / 12 * 9 / 10) << "12 layers";
  EXPECT_LT(streamed->two_layers_bytes, 4 * parameter_bytes / 12 * 11 / 10);
}

// The device has no limit of its own, which would hide a run that exceeds the target.
TEST(Train, StreamedWeightsAndActivationsTogetherHaveNoMoreThanTheTarget) {
  RunOptions options = Tiny(OffloadMode::kNone);
  const int64_t vocabulary = options.model.vocabulary;
  options.model = *FindGptSize("small");
  options.model.vocabulary = vocabulary;
  options.preset = ScaledDeviceFor(options.model)->preset;
  options.steps = 4;
  const absl::StatusOr<RunResult> expected = Train(options, Text(), nullptr);
  ASSERT_TRUE(expected.ok()) << expected.status();
  options.offload = OffloadMode::kPlanned;
  options.offload_weights = true;
  for (const uint64_t target_mib : {16, 20, 32, 48}) {
    SCOPED_TRACE(target_mib);
    const uint64_t target_bytes = target_mib << 20;
    options.memory_target_bytes = target_bytes;
    const absl::StatusOr<RunResult> streamed = Train(options, Text(), nullptr);
    ASSERT_TRUE(streamed.ok()) << streamed.status();
    EXPECT_EQ(streamed->losses, expected->losses);
    EXPECT_LE(streamed->peak_device_bytes, target_bytes);
    EXPECT_GT(streamed->peak_device_bytes, target_bytes * 99 / 100) << "what is left is used";
    EXPECT_GT(streamed->offloaded_tensors, 0);
  }
}

TEST(Train, ALimitBelowTheParametersIsRefusedWithWhatTheyNeed) {
  RunOptions options = Tiny(OffloadMode::kPinion);
  options.device_memory_bytes = 1 << 20;
  const absl::Status status = Train(options, Text(), nullptr).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("optimizer state alone take"));
}

// The memory limit, the scaled preset and the error message rely on these formulas.
TEST(Train, WhatARunHoldsAndSavesIsWhatTheFormulasSay) {
  const RunOptions options = Tiny(OffloadMode::kPinion);
  const absl::StatusOr<RunResult> result = Train(options, Text(), nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->persistent_bytes, PersistentBytes(options.model));
  EXPECT_NEAR(result->offloaded_bytes, SavedBytes(options.model), 0.05 * SavedBytes(options.model));
  EXPECT_NEAR(result->offloaded_tensors, SavedTensors(options.model), 4);
}

TEST(Train, AResumedRunGoesOnWithTheLossesOfAnUninterruptedOne) {
  for (const double dropout : {0.0, 0.1}) {
    RunOptions whole = Tiny(OffloadMode::kPinion);
    whole.model.dropout = dropout;
    whole.steps = 6;
    const std::vector<float> expected = Losses(whole);

    RunOptions first = whole;
    first.steps = 4;
    first.checkpoint_path = ::testing::TempDir() + "/checkpoint";
    RunOptions second = whole;
    second.steps = 2;
    second.resume_path = first.checkpoint_path;
    std::vector<float> losses = Losses(first);
    for (const float loss : Losses(second)) losses.push_back(loss);
    EXPECT_EQ(losses, expected) << "with dropout " << dropout;
  }
}

TEST(Train, ACheckpointOfAnotherModelIsRefusedWithBothDescriptions) {
  RunOptions options = Tiny(OffloadMode::kNone);
  options.steps = 1;
  options.checkpoint_path = ::testing::TempDir() + "/other";
  Losses(options);
  options.resume_path = options.checkpoint_path;
  options.model.layers = 2;
  const absl::Status status = Train(options, Text(), nullptr).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--layers=8"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--layers=2"));
}

TEST(Train, ProgressCountsStepsAndSeesMemoryAndTraffic) {
  std::vector<StepProgress> seen;
  const absl::StatusOr<RunResult> result =
      Train(Tiny(OffloadMode::kPinion), Text(),
            [&seen](const StepProgress& progress) { seen.push_back(progress); });
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(seen.size(), 5);
  EXPECT_EQ(seen.front().step, 1);
  EXPECT_EQ(seen.back().step, seen.back().last_step);
  EXPECT_EQ(static_cast<float>(seen.back().loss), result->losses.back());
  EXPECT_GT(seen.back().peak_device_bytes, result->persistent_bytes);
  EXPECT_GT(seen.back().pinned_host_bytes, 0);
  EXPECT_GT(seen.back().link_gb_per_s, 0);
}

}  // namespace training_run_test
}  // namespace pinion
