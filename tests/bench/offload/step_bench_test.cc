// Runs step_bench on the emulated device.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

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

TEST(StepBench, EachMethodHasARowWithThePlainStepsBitsAndLessMemory) {
  const std::string path = ::testing::TempDir() + "/step_bench.json";
  const ProgramOutcome outcome = RunProgram(
      "bench/offload/step_bench --device=emu:0 --size=tiny --rounds=1 --json=" + path, kFullHost);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  const nlohmann::json found = nlohmann::json::parse(FileContents(path));
  std::set<std::string> methods;
  const uint64_t all_bytes = found["rows"][0]["peak_bytes"];
  for (const nlohmann::json& row : found["rows"]) {
    const std::string method = row["method"];
    methods.insert(method);
    EXPECT_TRUE(row["modelled"]) << method;
    EXPECT_TRUE(row["same_bits"]) << method;
    EXPECT_GT(row["step_ms"], 0) << method;
    if (method == "none") continue;
    EXPECT_LT(row["peak_bytes"], all_bytes) << method;
  }
  EXPECT_EQ(methods, (std::set<std::string>{"none", "blocking", "trl", "windows",
                                            "planned within the peak of trl",
                                            "planned within the peak of windows"}));
  for (const nlohmann::json& goal : found["goals"]) EXPECT_TRUE(goal["met"]) << goal;
  EXPECT_EQ(found["goals"].size(), 4u);
}

TEST(StepBench, RefusesWhatItCannotRun) {
  const auto run = [](const std::string& flags) {
    return RunProgram("bench/offload/step_bench --device=emu:0 " + flags);
  };
  EXPECT_THAT(run("--rounds=0").err, HasSubstr("--rounds=0 must be at least 1"));
  EXPECT_THAT(run("--dtype=int8").err, HasSubstr("--dtype=int8 is neither float32 nor bfloat16"));
  EXPECT_THAT(run("--width=30 --heads=7").err, HasSubstr("--width=30 must be a multiple"));
  EXPECT_EQ(run("--size=huge").exit_code, 2);
}

}  // namespace
}  // namespace pinion
