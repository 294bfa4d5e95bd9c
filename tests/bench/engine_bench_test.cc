// The program as a user runs it.

#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

using ::testing::HasSubstr;

struct Outcome {
  int exit_code = -1;
  std::string out;
  std::string err;
};

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

Outcome RunBench(const std::string& flags) {
  const std::string out = testing::TempDir() + "/out", err = testing::TempDir() + "/err";
  const std::string command =
      absl::StrCat("bench/engine_bench --device=emu:0 ", flags, " >", out, " 2>", err);
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, Contents(out), Contents(err)};
}

TEST(EngineBenchTest, AQuickRunMeetsEveryGoalOfTheModelledLink) {
  const std::string path = testing::TempDir() + "/engine_bench.json";
  const Outcome outcome = RunBench(absl::StrCat("--quick --json=", path));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const nlohmann::json report = nlohmann::json::parse(Contents(path));
  int judged = 0;
  for (const nlohmann::json& goal : report["goals"]) {
    const std::string name = goal["name"];
    EXPECT_THAT(outcome.out, HasSubstr(name));
    if (absl::StartsWith(name, "Submit")) continue;  // wall time
    EXPECT_TRUE(goal["met"].get<bool>()) << goal;
    ++judged;
  }
  EXPECT_EQ(judged, 9);
  for (const nlohmann::json& row : report["rows"]) {
    EXPECT_EQ(row["modelled"].get<bool>(), row["section"] != "submit") << row;
    EXPECT_GT(row["ms"].get<double>(), 0) << row;
  }
}

TEST(EngineBenchTest, ModelledTimesAreLabelledAsSuch) {
  const Outcome outcome = RunBench("--benchmark_filter=copies/D2H/raw/1x4MiB");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("(modelled)"));
  EXPECT_THAT(outcome.out, ::testing::ContainsRegex("copies/D2H/raw/1x4MiB.*modelled"));
}

TEST(EngineBenchTest, BadInputGetsOneLineThatSaysWhatIsWrong) {
  EXPECT_THAT(RunBench("--preset=abacus").err, HasSubstr("no preset \"abacus\""));
  EXPECT_THAT(RunBench("--json=/no/such/dir/file").err, HasSubstr("/no/such/dir"));
  EXPECT_THAT(RunBench("faster").err, HasSubstr("\"faster\" is not a flag"));
  EXPECT_EQ(RunBench("faster").exit_code, 1);
}

}  // namespace
}  // namespace pinion
