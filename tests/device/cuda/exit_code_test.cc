// Programs that exit with copies in flight keep their exit code and never call an unloaded runtime.

#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "pinion/tests/support/run_program.h"

namespace pinion {
namespace {

using ::pinion::testing::ProgramOutcome;
using ::pinion::testing::RunProgram;

// Arguments of exiting_program: the holder of the state, and who ends the process.
using Ending = std::tuple<const char*, const char*>;

class ExitCodeTest : public ::testing::TestWithParam<Ending> {};

TEST_P(ExitCodeTest, IsWhatTheProgramReturnsAndNoUnloadedRuntimeIsCalled) {
  const auto& [holder, ender] = GetParam();
  const ProgramOutcome outcome =
      RunProgram(std::string("tests/device/cuda/exiting_program ") + holder + " " + ender);
  EXPECT_EQ(outcome.exit_code, 3) << outcome.err;
}

INSTANTIATE_TEST_SUITE_P(All, ExitCodeTest,
                         ::testing::Values(Ending("global", "main"), Ending("global", "thread"),
                                           Ending("local", "main"), Ending("local", "thread"),
                                           Ending("leaked", "main"), Ending("leaked", "thread"),
                                           Ending("leaked", "busy"), Ending("leaked", "pinning")),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) + "_" +
                                  std::get<1>(info.param);
                         });

}  // namespace
}  // namespace pinion
