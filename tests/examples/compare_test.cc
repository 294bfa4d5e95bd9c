// The comparison's verdict if the reference run does not repeat its own bits.

#include "pinion/examples/compare.h"

#include <ATen/Context.h>

#include <cstdlib>
#include <limits>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/examples/report.h"
#include "pinion/examples/training_run.h"
#include "pinion/programs/run_options.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace compare_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

RunResult Losses(float last) {
  RunResult result;
  result.losses = {4, 3, last};
  return result;
}

TEST(BitIdentical, ARunHasTheReferencesBitsOrNot) {
  EXPECT_EQ(BitIdentical(Losses(2), Losses(2), Losses(2)), true);
  EXPECT_EQ(BitIdentical(Losses(1), Losses(2), Losses(2)), false);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(BitIdentical(Losses(nan), Losses(nan), Losses(nan)), true) << "by bits";
}

TEST(BitIdentical, AReferenceThatDoesNotRepeatItselfSaysNothing) {
  EXPECT_EQ(BitIdentical(Losses(2), Losses(2), Losses(1)), std::nullopt);
  EXPECT_EQ(BitIdentical(Losses(1), Losses(2), Losses(1)), std::nullopt);
}

std::string Table(bool reference_repeats) {
  ComparedGroup group;
  group.runs.push_back(
      {OffloadMode::kNone, false, false, RunResult(), std::nullopt, reference_repeats});
  group.runs.push_back({OffloadMode::kPinion, false, false, RunResult(),
                        reference_repeats ? std::optional<bool>(true) : std::nullopt,
                        std::nullopt});
  return ComparisonTable({group}, /*modelled=*/false);
}

TEST(ComparisonTable, SaysUnknownWhereTheReferenceDoesNotRepeatItself) {
  EXPECT_THAT(Table(false), HasSubstr("unknown***"));
  EXPECT_THAT(Table(false), HasSubstr("does not repeat its own bits"));
  EXPECT_THAT(Table(true), Not(HasSubstr("***")));
}

TEST(CheckBits, NamesTheRunsWhoseBitsOffloadHasChanged) {
  ComparedGroup group;
  group.name = "cuda:0";
  group.runs.push_back({OffloadMode::kNone, false, false, RunResult(), std::nullopt, true});
  group.runs.push_back({OffloadMode::kBlocking, false, false, RunResult(), true, std::nullopt});
  group.runs.push_back({OffloadMode::kPinion, false, false, RunResult(), true, std::nullopt});
  EXPECT_THAT(CheckBits({group}), testing::IsOk());
  group.runs.back().bit_identical = false;
  EXPECT_THAT(CheckBits({group}), testing::StatusIs(absl::StatusCode::kDataLoss,
                                                    AllOf(HasSubstr("cuda:0 with --offload=pinion"),
                                                          Not(HasSubstr("--offload=blocking")))));
}

TEST(CheckBits, AReferenceThatDoesNotRepeatItselfIsNoOnesFault) {
  ComparedGroup group;
  group.runs.push_back({OffloadMode::kNone, false, false, RunResult(), std::nullopt, false});
  group.runs.push_back(
      {OffloadMode::kPinion, false, false, RunResult(), std::nullopt, std::nullopt});
  EXPECT_THAT(CheckBits({group}), testing::IsOk());
}

}  // namespace compare_test
}  // namespace pinion
