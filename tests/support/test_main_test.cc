// Runs this program again under its own name and under another one.

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/run_program.h"

namespace pinion::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Lists the program's tests. Without the variables, the listing keeps this test's result files.
ProgramOutcome ListTestsAs(const std::string& name) {
  const std::filesystem::path link = std::filesystem::path(::testing::TempDir()) / name;
  std::filesystem::remove(link);
  std::filesystem::create_symlink(std::filesystem::read_symlink("/proc/self/exe"), link);
  return RunProgram(absl::StrCat("env -u XML_OUTPUT_FILE -u GTEST_OUTPUT ", link.string(),
                                 " --gtest_list_tests"));
}

TEST(TestMainTest, AProgramRunsTheTestsOfTheFileThatItIsNamedAfterAndNoOthers) {
  const ProgramOutcome outcome = ListTestsAs("test_main_test");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("AProgramWhoseFileHasNoTestFails"));
  EXPECT_THAT(outcome.out, Not(HasSubstr("StatusMatchers")));
}

TEST(TestMainTest, AProgramWhoseFileHasNoTestFails) {
  const ProgramOutcome outcome = ListTestsAs("nothing_test");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("there is no test of a file nothing_test.cc"));
}

}  // namespace
}  // namespace pinion::testing
