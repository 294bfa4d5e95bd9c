// Runs the benchmark as a user does.

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/run_program.h"

namespace pinion {
namespace {

using ::testing::HasSubstr;

TEST(AllocatorBenchTest, BadInputGetsOneLineThatSaysWhatIsWrong) {
  const struct {
    const char* flags;
    const char* part;
  } cases[] = {
      {"faster", "\"faster\" is not a flag"},
      {"--traces=/no/such/folder", "no traces in /no/such/folder"},
      {"--json=/no/such/dir/file", "/no/such/dir"},
      {"--benchmark_filter=no_such_case", "--benchmark_filter leaves no case"},
  };
  for (const auto& [flags, part] : cases) {
    const testing::ProgramOutcome outcome =
        testing::RunProgram(absl::StrCat("bench/allocator/allocator_bench ", flags));
    EXPECT_EQ(outcome.exit_code, 2) << flags;
    EXPECT_THAT(outcome.err, HasSubstr(part));
  }
}

}  // namespace
}  // namespace pinion
