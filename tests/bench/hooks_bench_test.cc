// Runs the benchmark as a user does.

#include <nlohmann/json.hpp>
#include <string>

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

// The benchmark's times are wall time and not testable. Its counts are the same on every machine.
TEST(HooksBenchTest, AQuickRunCountsWhatEachTensorAsksOfTheDevice) {
  const std::string path = ::testing::TempDir() + "/hooks_bench.json";
  const ProgramOutcome outcome = RunProgram(
      absl::StrCat("bench/hooks_bench --quick --benchmark_filter=/100x --json=", path), kFullHost);
  ASSERT_LE(outcome.exit_code, 1) << outcome.out << outcome.err;
  const nlohmann::json report = nlohmann::json::parse(FileContents(path));
  EXPECT_EQ(report["rows"].size(), 13);
  for (const nlohmann::json& row : report["rows"]) {
    if (row.contains("recorded_us")) {
      // Recording adds two events for each save and each read.
      EXPECT_GE(row["recorded_events"].get<double>(), 4 + row["planned_events"].get<double>());
      EXPECT_GT(row["planned_us"].get<double>(), 0);
      continue;
    }
    const bool large = row["tensor_bytes"].get<uint64_t>() >= 1 << 20;
    EXPECT_GT(row["none_us"].get<double>(), 0) << row;
    EXPECT_GT(row["device_calls"].get<double>(), large ? 3 : 0) << row;
    EXPECT_GT(row["capture_queries"].get<double>(), 0) << row;
  }
  bool any_missed = false;
  for (const nlohmann::json& goal : report["goals"]) {
    const std::string name = goal["name"];
    EXPECT_THAT(outcome.out, HasSubstr(name));
    any_missed |= outcome.out.find("MISSED  " + name) != std::string::npos;
  }
  EXPECT_EQ(report["goals"].size(), 7);
  EXPECT_EQ(outcome.exit_code, any_missed ? 1 : 0);
}

TEST(HooksBenchTest, BadInputGetsOneLineThatSaysWhatIsWrong) {
  const auto run = [](const std::string& flags) {
    return RunProgram("bench/hooks_bench " + flags);
  };
  EXPECT_THAT(run("--json=/no/such/dir/file").err, HasSubstr("/no/such/dir"));
  EXPECT_THAT(run("faster").err, HasSubstr("\"faster\" is not a flag"));
  EXPECT_EQ(run("faster").exit_code, 2);
  EXPECT_THAT(run("--benchmark_filter=no_such_case").err,
              HasSubstr("--benchmark_filter leaves no case"));
}

}  // namespace
}  // namespace pinion
