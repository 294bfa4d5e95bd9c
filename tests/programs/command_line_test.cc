// Flags and signals that end a program early.

#include "pinion/programs/command_line.h"

#include <signal.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

ABSL_FLAG(int, number_of_command_line_test, 0, "a number");
ABSL_FLAG(std::string, text_of_command_line_test, "", "a text");
ABSL_FLAG(bool, switch_of_command_line_test, false, "on or off");

namespace pinion {
namespace {

constexpr int kFailedAfterwards = 3;

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
    for (const int second : {SIGINT, SIGTERM}) {
      EXPECT_EXIT(
          {
            StopBySignal();
            raise(signal);
            raise(second);
            std::_Exit(0);
          },
          ::testing::KilledBySignal(second), "");
    }
  }
}

// Parses `arguments` and exits with kFailedAfterwards if parsing returns.
[[noreturn]] void ParseAndFail(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "program");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  ParseFlags(static_cast<int>(argv.size()), argv.data());
  std::exit(kFailedAfterwards);
}

TEST(CommandLineDeathTest, AskingForHelpIsNoError) {
  const std::vector<std::string> requests[] = {
      {"--help"},
      {"-help"},
      {"--help=number"},
      {"--helpfull"},
      {"--helpshort"},
      {"--helppackage"},
      {"--helpmatch=number"},
      {"--helpon=command_line"},
      {"--version"},
      {"stray", "--help"},
      {"--text_of_command_line_test=x", "--help"},
      {"--text_of_command_line_test", "x", "--help"},
      {"--switch_of_command_line_test", "--help"},
  };
  for (const std::vector<std::string>& arguments : requests) {
    EXPECT_EXIT(ParseAndFail(arguments), ::testing::ExitedWithCode(0), "")
        << ::testing::PrintToString(arguments);
  }
}

TEST(CommandLineDeathTest, AnExitStatusStaysWhereNoOneAskedForHelp) {
  const std::vector<std::string> accepted[] = {
      {"help"},
      {"version"},
      {"--text_of_command_line_test", "help.json"},
      {"--text_of_command_line_test=--help"},
      {"--text_of_command_line_test", "--help"},
      {"--", "--help"},
  };
  for (const std::vector<std::string>& arguments : accepted) {
    EXPECT_EXIT(ParseAndFail(arguments), ::testing::ExitedWithCode(kFailedAfterwards), "")
        << ::testing::PrintToString(arguments);
  }
  const std::vector<std::string> refused[] = {
      {"--helpx"},
      {"--help_me"},
      {"--versions"},
      {"--number_of_command_line_test=x"},
      {"--number_of_command_line_test", "--help"},
      {"--number_of_command_line_test=x", "help"},
      {"--number_of_command_line_test=x", "--text_of_command_line_test", "--help"},
      {"--number_of_command_line_test=x", "--", "--help"},
  };
  for (const std::vector<std::string>& arguments : refused) {
    EXPECT_EXIT(ParseAndFail(arguments), ::testing::ExitedWithCode(1), "ERROR")
        << ::testing::PrintToString(arguments);
  }
}

TEST(CommandLineDeathTest, FlagsGetTheirValues) {
  const auto parse = [] {
    std::string name = "program", flag = "--number_of_command_line_test=7";
    char* argv[] = {name.data(), flag.data(), nullptr};
    ParseFlags(2, argv);
    std::_Exit(absl::GetFlag(FLAGS_number_of_command_line_test));
  };
  EXPECT_EXIT(parse(), ::testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace pinion
