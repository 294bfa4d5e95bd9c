// Runs README's program as a user does.

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/run_program.h"

namespace pinion {
namespace {

using ::testing::ContainsRegex;
using testing::FileContents;
using ::testing::HasSubstr;
using testing::ProgramOutcome;
using testing::RunProgram;

TEST(OffloadExampleTest, ItTrainsAndItsActivationsLeaveAndComeBack) {
  const ProgramOutcome outcome = RunProgram("examples/offload");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, ContainsRegex("step 0: loss [01]\\.[0-9]+\nstep 1: loss [01]\\.[0-9]+\n"
                                         "step 2: loss [01]\\.[0-9]+\nsaved tensors: "));
  EXPECT_THAT(outcome.out, ContainsRegex("= [1-9][0-9]* offloaded"));
  EXPECT_THAT(outcome.out, ContainsRegex("evicted [1-9]"));
  EXPECT_THAT(outcome.out, ContainsRegex("fetched [1-9][0-9.]* MiB"));
  EXPECT_THAT(outcome.out, HasSubstr(" 0 fetched on demand"));
  EXPECT_THAT(outcome.out, HasSubstr("; 0 handles alive"));
}

TEST(OffloadExampleTest, ReadmeShowsTheProgramAsItIs) {
  const std::string source = FileContents("examples/offload.cc");
  const size_t begin = source.find("#include");
  ASSERT_NE(begin, std::string::npos);
  EXPECT_THAT(FileContents("README.md"), HasSubstr("```cpp\n" + source.substr(begin) + "```\n"));
}

}  // namespace
}  // namespace pinion
