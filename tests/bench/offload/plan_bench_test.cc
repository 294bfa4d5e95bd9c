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

// Planning times are wall time and not testable. The cost of recording a step is modelled.
TEST(PlanBenchTest, AQuickRunPlansAndRecordsWhatItSays) {
  const std::string path = ::testing::TempDir() + "/plan_bench.json";
  const ProgramOutcome outcome =
      RunProgram(absl::StrCat("bench/offload/plan_bench --quick --json=", path), kFullHost);
  ASSERT_LE(outcome.exit_code, 1) << outcome.out << outcome.err;
  const nlohmann::json report = nlohmann::json::parse(FileContents(path));
  EXPECT_EQ(report["rows"].size(), 11);
  int planned = 0;
  for (const nlohmann::json& row : report["rows"]) {
    if (row.contains("recorded_us")) {
      EXPECT_GE(row["planned_us"].get<double>(), 0.999 * row["alone_us"].get<double>()) << row;
      EXPECT_GT(row["ratio"].get<double>(), 1) << row;
      EXPECT_LT(row["ratio"].get<double>(), 1.05) << row;
      continue;
    }
    ++planned;
    EXPECT_GT(row["plan_ms"].get<double>(), 0) << row;
    EXPECT_GT(row["moves"].get<int>(), 0) << row;
  }
  EXPECT_EQ(planned, 10);
  bool any_missed = false;
  for (const nlohmann::json& goal : report["goals"]) {
    const std::string name = goal["name"];
    EXPECT_THAT(outcome.out, HasSubstr(name));
    EXPECT_FALSE(goal["value"].is_null()) << name;
    any_missed |= outcome.out.find("MISSED  " + name) != std::string::npos;
  }
  EXPECT_EQ(report["goals"].size(), 4);
  EXPECT_EQ(outcome.exit_code, any_missed ? 1 : 0);
}

TEST(PlanBenchTest, BadInputGetsOneLineThatSaysWhatIsWrong) {
  EXPECT_THAT(RunProgram("bench/offload/plan_bench --json=/no/such/dir/file").err,
              HasSubstr("/no/such/dir"));
  EXPECT_THAT(RunProgram("bench/offload/plan_bench --benchmark_filter=no_such_case").err,
              HasSubstr("--benchmark_filter leaves no case"));
}

}  // namespace
}  // namespace pinion
