// Runs the benchmark as a user does.

#include <map>
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

// On this preset the link cannot hide the model's copies.
TEST(AttributionBenchTest, AQuickRunComparesAllWaysAndJudgesItself) {
  const std::string path = ::testing::TempDir() + "/attribution_bench.json";
  const ProgramOutcome outcome =
      RunProgram(absl::StrCat("bench/attribution/attribution_bench --quick --models=unet "
                              "--presets=a100_pcie4 --json=",
                              path),
                 kFullHost);
  ASSERT_LE(outcome.exit_code, 1) << outcome.out << outcome.err;
  const nlohmann::json report = nlohmann::json::parse(FileContents(path));
  std::map<std::string, std::map<std::string, nlohmann::json>> methods;
  for (const nlohmann::json& row : report["rows"]) {
    methods[row["method"]][row["way"]] = row;
    EXPECT_TRUE(row.value("same_values", true)) << row.dump();
  }
  ASSERT_EQ(methods.size(), 2u);
  std::map<std::string, nlohmann::json>& products = methods["gradient x activation"];
  std::map<std::string, nlohmann::json>& values = methods["activation"];
  ASSERT_EQ(products.size(), 5u);
  ASSERT_EQ(values.size(), 4u);

  // The memory that Captum is known to hold. `s` is the size of all layers' values.
  const auto of = [](const nlohmann::json& row, const char* what) {
    return row[what].get<double>();
  };
  const double s = of(values["pinion"], "captured_mib");
  const nlohmann::json& plain = products["plain"];
  EXPECT_EQ(of(products["pinion"], "captured_mib"), 2 * s);
  const auto over_plain = [&](const char* way) {
    return of(products[way], "peak_mib") - of(plain, "peak_mib");
  };
  EXPECT_NEAR(over_plain("captum"), 2 * s, 0.3);
  EXPECT_NEAR(over_plain("captum, memory_efficient"), s, 0.3);
  EXPECT_LE(over_plain("pinion"), of(products["pinion"], "two_largest_mib"));
  EXPECT_GT(of(products["captum"], "held_mib"), 2 * s);
  EXPECT_NEAR(of(values["captum"], "held_mib"), s, 0.1);

  // Bytes that cross the link.
  EXPECT_EQ(of(products["captum"], "copied_mib"), 0);
  EXPECT_EQ(of(products["captum, then .cpu()"], "copied_mib"), s);
  EXPECT_EQ(of(products["captum, memory_efficient"], "copied_mib"), 2 * s);
  EXPECT_EQ(of(products["pinion"], "copied_mib"), 2 * s);
  EXPECT_EQ(of(values["pinion"], "copied_mib"), s);

  // The host reads the values twice and the products three times, at 164 GB/s.
  EXPECT_NEAR(of(products["captum, memory_efficient"], "host_arithmetic_us"),
              5 * s * 1024 * 1024 / 164e3, 0.1);
  EXPECT_GE(of(values["pinion"], "time_us"), of(values["pinion"], "bound_us"));
  // Excludes pinning. The limit allows for copies and arithmetic without any overlap.
  EXPECT_LT(of(products["pinion"], "time_us"), 1.5 * of(plain, "time_us"));

  for (const nlohmann::json& goal : report["goals"]) {
    const std::string name = goal["name"];
    EXPECT_THAT(outcome.out, HasSubstr(name));
    EXPECT_NE(goal["met"], false) << name;
  }
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_EQ(report["goals"].size(), 14);
}

TEST(AttributionBenchTest, MethodsAlongAPathKeepToEveryBudget) {
  const std::string path = ::testing::TempDir() + "/attribution_paths.json";
  const ProgramOutcome outcome =
      RunProgram(absl::StrCat("bench/attribution/attribution_bench --quick --models=convnet "
                              "--presets=gh200_c2c --json=",
                              path),
                 kFullHost);
  ASSERT_LE(outcome.exit_code, 1) << outcome.out << outcome.err;
  int rows = 0, with_more_steps = 0;
  const nlohmann::json report = nlohmann::json::parse(FileContents(path));
  for (const nlohmann::json& row : report["rows"]) {
    if (!row.contains("n_steps")) continue;
    ++rows;
    const bool fits_at_once = row["n_steps"] <= row["budget_steps"];
    EXPECT_LE(row["difference"].get<double>(), 1e-5) << row.dump();
    if (row["way"] == "captum") {
      EXPECT_EQ(row["forwards"] <= 3, fits_at_once) << row.dump();
      continue;
    }
    EXPECT_LE(row["peak_mib"].get<double>(), row["budget_mib"].get<double>()) << row.dump();
    if (fits_at_once) continue;
    ++with_more_steps;
    EXPECT_GE(row["peak_mib"].get<double>(), 0.9 * row["budget_mib"].get<double>()) << row.dump();
  }
  EXPECT_EQ(rows, 2 * 3 * 3);
  EXPECT_EQ(with_more_steps, 3);
}

TEST(AttributionBenchTest, BadInputGetsOneLineThatSaysWhatIsWrong) {
  const auto run = [](const std::string& flags) {
    return RunProgram("bench/attribution/attribution_bench " + flags);
  };
  EXPECT_THAT(run("--json=/no/such/dir/file").err, HasSubstr("/no/such/dir"));
  EXPECT_THAT(run("--models=resnet").err, HasSubstr("--models=resnet"));
  EXPECT_THAT(run("--presets=a200").err, HasSubstr("a200"));
  EXPECT_EQ(run("--presets=a200").exit_code, 2);
}

}  // namespace
}  // namespace pinion
