// Runs the benchmark as a user does.

#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/run_program.h"

namespace pinion {
namespace {

using testing::FileContents;
using ::testing::HasSubstr;
using testing::kFullHost;
using testing::ProgramOutcome;
using testing::RunProgram;

ProgramOutcome RunBench(const std::string& flags) {
  return RunProgram("bench/engine_bench --device=emu:0 " + flags, kFullHost);
}

// Submit's goal is about wall time. A busy machine misses it, and the program then exits with 1.
TEST(EngineBenchTest, AQuickRunMeetsEveryGoalOfTheModelledLink) {
  const std::string path = ::testing::TempDir() + "/engine_bench.json";
  const ProgramOutcome outcome = RunBench(absl::StrCat("--quick --json=", path));
  ASSERT_LE(outcome.exit_code, 1) << outcome.err;
  const nlohmann::json report = nlohmann::json::parse(FileContents(path));
  int judged = 0;
  bool any_missed = false;
  for (const nlohmann::json& goal : report["goals"]) {
    const std::string name = goal["name"];
    EXPECT_THAT(outcome.out, HasSubstr(name));
    any_missed |= !goal["met"].get<bool>();
    if (absl::StartsWith(name, "Submit")) continue;  // wall time
    EXPECT_TRUE(goal["met"].get<bool>()) << goal;
    ++judged;
  }
  EXPECT_EQ(judged, 9);
  EXPECT_EQ(outcome.exit_code, any_missed ? 1 : 0);
  for (const nlohmann::json& row : report["rows"]) {
    const bool is_submit = absl::StartsWith(row["case"].get<std::string>(), "submit/");
    EXPECT_EQ(row["modelled"].get<bool>(), !is_submit) << row;
    EXPECT_GT(row["ms"].get<double>(), 0) << row;
  }
}

// On this preset's slow link packing gains at most 4.7, which misses the goal of 5.
TEST(EngineBenchTest, AMissedGoalIsTheExitStatus) {
  const ProgramOutcome outcome = RunBench("--preset=a100_pcie4 --quick --benchmark_filter=pieces/");
  const bool missed = outcome.out.find("MISSED") != std::string::npos;
  EXPECT_EQ(outcome.exit_code, missed ? 1 : 0) << outcome.out << outcome.err;
  EXPECT_TRUE(missed) << outcome.out;
}

TEST(EngineBenchTest, ModelledTimesAreLabelledAsSuch) {
  const ProgramOutcome outcome = RunBench("--benchmark_filter=copies/D2H/raw/16x4MiB");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("(modelled)"));
  EXPECT_THAT(outcome.out, ::testing::ContainsRegex("copies/D2H/raw/16x4MiB.*modelled"));
}

TEST(EngineBenchTest, BadInputGetsOneLineThatSaysWhatIsWrong) {
  EXPECT_THAT(RunBench("--preset=abacus").err, HasSubstr("no preset \"abacus\""));
  EXPECT_THAT(RunBench("--json=/no/such/dir/file").err, HasSubstr("/no/such/dir"));
  EXPECT_THAT(RunBench("faster").err, HasSubstr("\"faster\" is not a flag"));
  EXPECT_EQ(RunBench("faster").exit_code, 2);
  const ProgramOutcome nothing = RunBench("--benchmark_filter=no_such_case");
  EXPECT_EQ(nothing.exit_code, 2);
  EXPECT_THAT(nothing.err, HasSubstr("--benchmark_filter leaves no case"));
}

}  // namespace
}  // namespace pinion
