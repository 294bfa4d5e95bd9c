// What ends a program early.

#include "pinion/programs/command_line.h"

#include <signal.h>

#include <cstdlib>
#include <string>

#include "absl/flags/flag.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

ABSL_FLAG(int, number_of_command_line_test, 0, "a number");

namespace pinion {
namespace {

TEST(CommandLineDeathTest, TheFirstSignalIsToldAndTheSecondKills) {
  for (const int signal : {SIGINT, SIGTERM}) {
    EXPECT_EXIT(
        {
          StopBySignal();
          if (StopSignal() != 0) std::_Exit(1);
          raise(signal);
          std::_Exit(128 + StopSignal());
        },
        ::testing::ExitedWithCode(128 + signal), "");
    EXPECT_EXIT(
        {
          StopBySignal();
          raise(signal);
          raise(signal);
          std::_Exit(0);
        },
        ::testing::KilledBySignal(signal), "");
  }
}

TEST(CommandLineDeathTest, AskingForHelpIsNoError) {
  const auto parse = [](std::string argument) {
    std::string name = "program";
    char* argv[] = {name.data(), argument.data(), nullptr};
    ParseFlags(2, argv);
    std::_Exit(absl::GetFlag(FLAGS_number_of_command_line_test));
  };
  for (const char* const help : {"--help", "-help", "--helpfull"}) {
    EXPECT_EXIT(parse(help), ::testing::ExitedWithCode(0), "") << help;
  }
  EXPECT_EXIT(parse("--number_of_command_line_test=7"), ::testing::ExitedWithCode(7), "");
  EXPECT_EXIT(parse("--number_of_command_line_test=x"), ::testing::ExitedWithCode(1), "x");
}

}  // namespace
}  // namespace pinion
