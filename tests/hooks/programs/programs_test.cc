// Random programs. Each computes the bits that it computes without offload, and leaves nothing
// behind. The device has as much memory as the target allows. It has a little more for some steps:
// those that leave an operator out, unfreeze a parameter, or give a streamed one a hook. Such a
// step must be counted (docs/users/limits.md). The device has no limit in the first odd step of
// each kind (program.h), and has it again from the next step on.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/hooks/programs/minimise.h"
#include "pinion/tests/hooks/programs/program.h"
#include "pinion/tests/hooks/programs/run_program.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace programs_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kPrograms = 500;
constexpr int kProgramsPerTest = 25;

class RandomPrograms : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(, RandomPrograms, ::testing::Range(1, kPrograms + 1, kProgramsPerTest));

TEST_P(RandomPrograms, HaveTheBitsOfTheSameOnesWithoutOffloadWithinTheirTargets) {
  for (int seed = GetParam(); seed < GetParam() + kProgramsPerTest; ++seed) {
    const Program program = Program::Draw(static_cast<uint64_t>(seed));
    const Verdict verdict = RunProgram(program);
    if (verdict.kind == FailureKind::kNone) continue;
    ADD_FAILURE() << "seed " << seed << ": " << verdict.ToString() << "\n"
                  << DescribeMinimal(program, verdict);
  }
}

// Programs that once exceeded their targets, each for another reason.
constexpr const char* kOnceTooLarge[] = {
    // A checkpoint's reader frees what it read before its peak.
    "steps 2; input_requires_grad 1; session 1; scope_has_module 1; target 2; target_percent 83; "
    "r1 = in_place(r0, r0, 0); r0 = whole_checkpoint(r0, r0, 1); "
    "r1 = whole_checkpoint(r0, r0, 0); r0 = transposed(r0, r3, 0)",
    "steps 2; rows 20; session 1; target 2; target_percent 100; r0 = linear(r0, r0, 0); "
    "r2 = mul(r0, r0, 0); r0 = whole_checkpoint(r0, r0, 6); r2 = custom(r0, r0, 0); "
    "r0 = rrelu(r3, r0, 0)",
    // An aliased saved output kept its node alive.
    "steps 2; rows 16; session 1; target 2; r0 = linear(r0, r0, 0); r1 = custom(r0, r0, 0); "
    "r3 = mask(r0, r0, 0); r0 = in_place_view(r0, r0, 0); r0 = in_place_view(r0, r1, 0)",
    // A resident view keeps its whole storage.
    "steps 2; session 1; target 2; r0 = layer_norm(r0, r0, 0); r0 = broadcast(r0, r0, 0)",
    // The first micro-batch makes gradients, the second one adds to them.
    "steps 2; rows 28; micro_batches 2; optimizer 1; normalises_input 1; session 1; target 2; "
    "r3 = layer_norm(r0, r0, 0); r0 = mul(r3, r3, 0); r2 = add(r0, r0, 0)",
    // A saved tensor that no backward reads.
    "steps 2; rows 48; micro_batches 2; optimizer 1; input_requires_grad 1; session 1; target 2; "
    "r2 = group_norm(r0, r0, 0); r0 = whole_checkpoint(r0, r0, 0); r2 = sin(r0, r0, 0)",
    // The program frees a tensor that is needed, and then one that is not.
    "steps 2; rows 28; forwards 2; input_requires_grad 1; session 1; min_bytes 2048; target 2; "
    "r1 = add(r0, r0, 0); r0 = reshape(r0, r0, 0); r2 = detach(r0, r0, 0); "
    "r0 = linear(r1, r0, 0); r1 = softmax(r0, r0, 0); r2 = dropout(r0, r0, 0); "
    "r0 = custom(r0, r0, 0)",
    // In step 2 the first micro-batch creates gradients, whose former memory momentum uses.
    "steps 2; rows 16; micro_batches 2; optimizer 1; session 1; target 2; "
    "r0 = group_norm(r0, r0, 0); r2 = rrelu(r0, r0, 0); r0 = checkpoint(r0, r0, 3); "
    "r0 = custom(r0, r0, 5); r1 = cast(r0, r0, 0)",
    // Offloading a planned tensor frees nothing, so others must be offloaded.
    "steps 2; rows 48; micro_batches 2; forwards 2; backwards 2; optimizer 1; session 1; target 2; "
    "r0 = gelu(r0, r0, 0); r0 = layer_norm(r0, r0, 0); r0 = transposed(r0, r0, 0)",
    // A part of a storage is saved before the rest.
    "steps 2; rows 48; forwards 2; session 1; target 2; target_percent 16; "
    "r0 = layer_norm(r0, r0, 0); r1 = attention(r0, r0, 0); r2 = broadcast(r1, r0, 0); "
    "r2 = linear(r2, r0, 0); r2 = batch_norm(r1, r0, 0)",
    // Only the second step's backward makes a graph.
    "steps 2; rows 11; backwards 2; create_graph 2; autocast 1; input_requires_grad 1; session 1; "
    "target 2; r0 = mask(r0, r0, 0); r0 = rrelu(r0, r0, 0)",
    // The second step leaves an operator out.
    "steps 2; rows 32; forwards 2; odd_steps_skip 4; session 1; target 2; r0 = gelu(r0, r0, 0); "
    "r3 = slice(r0, r0, 0); r0 = conv(r3, r0, 0); r0 = softmax(r1, r0, 0)",
    // A segment's input shares a copy, and is copied again to memory of its own.
    "steps 2; rows 16; micro_batches 2; input_requires_grad 1; session 1; target 2; "
    "r0 = in_place_view(r0, r0, 0); r3 = add(r0, r0, 0); r0 = checkpoint(r0, r0, 7); "
    "r3 = gelu(r2, r0, 0); r0 = mask(r0, r0, 0); r0 = transposed(r0, r0, 0); "
    "r0 = custom(r0, r0, 0); r0 = in_place_view(r0, r0, 0); r0 = planned_checkpoint(r0, r0, 0); "
    "r0 = cast(r1, r0, 0); r0 = mask(r0, r0, 0); r0 = linear(r0, r0, 0)",
    // A weight used twice in a forward, and one that stays after its last use.
    "streams_weights 1; target 2; r1 = linear(r0, r0, 0)",
    "micro_batches 2; streams_weights 1; target 2; r1 = conv(r0, r0, 0)",
    // An operator that uses two layers' weights.
    "steps 2; rows 16; forwards 2; session 1; streams_weights 1; target 2; "
    "r0 = group_norm(r0, r0, 0); r0 = gelu(r0, r0, 0); r0 = layer_norm(r0, r0, 0); "
    "r0 = attention(r0, r0, 0); r0 = linear(r0, r0, 1)",
    // A tensor that is to leave has not left, when an operator fetches a layer.
    "steps 2; rows 48; micro_batches 2; optimizer 1; input_requires_grad 1; session 1; "
    "streams_weights 1; gradients_stay 1; target 2; target_percent 35; r0 = where(r0, r0, 0); "
    "r3 = broadcast(r0, r0, 0); r0 = attention(r0, r3, 0); r0 = as_strided(r0, r0, 0); "
    "r0 = group_norm(r0, r0, 0); r0 = rrelu(r0, r0, 0); r0 = recurrent(r0, r0, 0)",
    // What is read goes for its own reader, and has to come back.
    "steps 2; backwards 2; session 1; target 2; target_percent 15; r0 = conv(r0, r0, 0); "
    "r3 = slice(r0, r0, 0); r1 = reshape(r0, r0, 0); r0 = broadcast(r3, r0, 0); "
    "r0 = checkpoint(r0, r0, 2); r0 = where(r0, r0, 0); r0 = transposed(r0, r1, 0); "
    "r0 = reshape(r0, r3, 0); r0 = custom(r0, r0, 0)",
    // The graph of a second derivative keeps what a checkpoint has read.
    "steps 2; rows 32; create_graph 1; session 1; target 2; r2 = cast(r0, r0, 0); "
    "r3 = linear(r2, r0, 0); r0 = whole_checkpoint(r0, r0, 0); r0 = layer_norm(r3, r0, 0)",
    "steps 2; rows 28; backwards 2; create_graph 1; session 1; target 2; target_percent 89; "
    "r0 = transposed(r0, r0, 0); r3 = layer_norm(r0, r0, 0); r0 = checkpoint(r0, r0, 0); "
    "r0 = layer_norm(r3, r0, 0)",
    // Short and long steps, which differ in small tensors alone, take turns.
    "steps 4; rows 16; micro_batches 2; autocast 1; odd_steps_are_short 1; session 1; "
    "streams_weights 1; min_bytes 8192; target 2; r2 = recurrent(r0, r0, 0); "
    "r0 = linear(r2, r0, 0); r3 = attention(r0, r0, 0); r0 = group_norm(r0, r0, 0)",
};

TEST(Programs, ThatOnceExceededTheirTargetsDoSoNoMore) {
  for (const char* const text : kOnceTooLarge) {
    Program program;
    ASSERT_THAT(program.Add(text), IsOk());
    EXPECT_EQ(RunProgram(program).ToString(), "passes") << text;
  }
}

TEST(Programs, HaveTheSameBitsWhereTheHostHasNoRoom) {
  constexpr absl::string_view kNet =
      "steps 3; session 1; r0 = linear(r0, r0, 0); r1 = sin(r0, r0, 0); r0 = mul(r0, r1, 0); "
      "r0 = gelu(r0, r0, 0)";
  for (const absl::string_view host :
       {"host_kib 4", "host_is_full 2", "host_kib 4; target 2", "host_is_full 1; target 2"}) {
    Program program;
    ASSERT_THAT(program.Add(kNet), IsOk());
    ASSERT_THAT(program.Add(host), IsOk());
    const Verdict verdict = RunProgram(program);
    EXPECT_EQ(verdict.ToString(), "passes") << host;
    EXPECT_GT(verdict.refusals, 0u) << host;
  }
}

TEST(Programs, HaveEachSettingInOneOfTheFirstSeeds) {
  for (const Setting& setting : Settings()) {
    bool is_drawn = false;
    for (uint64_t seed = 1; seed <= kPrograms && !is_drawn; ++seed) {
      is_drawn = Program::Draw(seed).*setting.value != Program().*setting.value;
    }
    EXPECT_TRUE(is_drawn) << setting.name;
  }
}

TEST(Programs, HaveFirstOddStepsAndLaterOnes) {
  Program program;
  ASSERT_THAT(program.Add("odd_steps_measure 1"), IsOk());
  std::vector<int> odd, first;
  for (int step = 0; step < 12; ++step) {
    if (program.IsOdd(step)) odd.push_back(step);
    if (program.IsFirstOddOfItsKind(step)) first.push_back(step);
  }
  EXPECT_THAT(odd, ElementsAre(3, 7, 11));
  EXPECT_THAT(first, ElementsAre(3));
  ASSERT_THAT(program.Add("odd_steps_longer 2"), IsOk());
  for (int step = 0; step < 12; ++step) {
    EXPECT_EQ(program.IsOdd(step), step % 4 != 0) << step;
    EXPECT_EQ(program.IsFirstOddOfItsKind(step), step > 0 && step < 4) << step;
  }
}

// With windows instead of a target, which odd steps may not exceed.
TEST(Programs, HaveTheSameBitsWithOddSteps) {
  constexpr absl::string_view kNet =
      "steps 8; micro_batches 2; session 1; window_kib 1; r0 = linear(r0, r0, 0); "
      "r0 = planned_checkpoint(r0, r0, 1); r1 = dropout(r0, r0, 0); r0 = mul(r0, r1, 0)";
  for (const absl::string_view odd :
       {"odd_steps_measure 1", "odd_steps_measure 2", "odd_steps_longer 3", "other_model 1",
        "other_model 2", "other_model 2; streams_weights 1"}) {
    Program program;
    ASSERT_THAT(program.Add(kNet), IsOk());
    ASSERT_THAT(program.Add(odd), IsOk());
    EXPECT_EQ(RunProgram(program).ToString(), "passes") << odd;
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
