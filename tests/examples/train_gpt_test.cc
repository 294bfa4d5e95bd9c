// Runs the program as a user does.

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/run_program.h"

namespace pinion {
namespace {

using ::testing::AllOf;
using testing::FileContents;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::ProgramOutcome;
using testing::RunProgram;
using ::testing::StartsWith;

class TrainGptTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
    std::ofstream text(text_);
    for (int i = 0; i < 400; ++i) text << "the quick brown fox jumps over the lazy dog " << i * i;
  }

  // Runs the program with `flags`; `environment` precedes it in shell syntax.
  ProgramOutcome Run(const std::string& flags, const std::string& environment = "") const {
    return RunProgram(absl::StrCat(environment, " examples/train_gpt ", flags));
  }

  ProgramOutcome Tiny(const std::string& flags) const {
    return Run(absl::StrCat("--device=emu:0 --size=tiny --text=", text_, " ", flags));
  }

  // Sends `signal` once the program has printed `text`. The program writes to the file "log".
  ProgramOutcome SignalAfter(const std::string& text, const std::string& signal,
                             const std::string& flags) const {
    const std::string log = directory_ + "/log";
    std::filesystem::remove(log);
    return RunProgram(absl::StrCat("{ examples/train_gpt --device=emu:0 --size=tiny --text=", text_,
                                   " ", flags, " > ", log, " & id=$!; until grep -q '", text, "' ",
                                   log, " || ! kill -0 $id; do sleep 0.1; done; kill -", signal,
                                   " $id; wait $id; }"));
  }

  nlohmann::json Runs(const std::string& path) const {
    return nlohmann::json::parse(FileContents(path))["runs"];
  }

  std::vector<std::string> Files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  void ExpectOneClearLine(const ProgramOutcome& outcome, const std::string& part) const {
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_THAT(outcome.err, HasSubstr(part));
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_EQ(outcome.err.back(), '\n');
  }

  const std::string directory_ = ::testing::TempDir() + "/train_gpt_test";
  const std::string text_ = directory_ + "/text";
};

TEST_F(TrainGptTest, BadInputGetsOneLineThatSaysWhatIsWrong) {
  const struct {
    const char* flags;
    const char* part;
  } cases[] = {
      {"--text=/no/such/file", "/no/such/file"},
      {"--text=/dev/null", "/dev/null is empty"},
      {"--sequence=1000000 --batch=1", "--sequence=1000000"},
      {"--device=tpu:0", "--device=tpu:0"},
      {"--device=emu:1", "--device=emu:1"},
      {"--preset=dreamt", "h100_pcie5"},
      {"--size=huge", "tiny, small"},
      {"--offload=maybe", "--offload=maybe"},
      {"--dtype=int8", "--dtype=int8"},
      {"--heads=3", "--heads=3"},
      {"--steps=0", "--steps=0"},
      {"--device_memory=1MiB", "optimizer state alone take"},
      {"--device_memory=lots", "--device_memory=lots"},
      {"--memory_target=12", "--memory_target=12 B is too small: parameters"},
      {"--steps=many", "many"},
      {"--no_such_flag", "no_such_flag"},
      {"stray", "stray"},
      {"--json=/no/such/directory/out.json", "/no/such/directory/out.json"},
      {"--trace=/no/such/directory/out.json", "/no/such/directory/out.json"},
      {"--checkpoint=/no/such/directory/out.pt", "/no/such/directory/out.pt"},
      {"--resume=/no/such/file.pt", "/no/such/file.pt"},
      {"--compare --checkpoint=x", "--compare"},
      {"--compare --checkpoint_blocks", "--compare"},
  };
  const std::string outputs =
      absl::StrCat(" --json=", directory_, "/json --checkpoint=", directory_, "/checkpoint");
  for (const auto& [flags, part] : cases) {
    SCOPED_TRACE(flags);
    ExpectOneClearLine(Tiny(absl::StrCat(outputs, " ", flags)), part);
    EXPECT_EQ(Files(), std::vector<std::string>({"text"})) << "nothing is left behind";
  }
}

TEST_F(TrainGptTest, AMissingBibleNamesThePackageThatHasIt) {
  const ProgramOutcome outcome = Run("--device=emu:0", "PATH=/nowhere");
  ExpectOneClearLine(outcome, "bible-kjv");
}

TEST_F(TrainGptTest, ADamagedCheckpointIsRefusedAndKept) {
  const std::string path = directory_ + "/checkpoint";
  ASSERT_EQ(Tiny("--steps=1 --checkpoint=" + path).exit_code, 0);
  const std::string whole = FileContents(path);
  ASSERT_GT(whole.size(), 100'000);

  std::string flipped = whole;
  flipped[whole.size() / 2] ^= 1;
  for (const std::string& damaged :
       {flipped, whole.substr(0, whole.size() / 2), std::string("not a checkpoint")}) {
    std::ofstream(path, std::ios::binary) << damaged;
    ExpectOneClearLine(Tiny(absl::StrCat("--steps=1 --resume=", path, " --checkpoint=", path)),
                       path);
    EXPECT_EQ(FileContents(path), damaged);
  }
}

TEST_F(TrainGptTest, WithoutOffloadTheDefaultLimitIsTooSmallAndTheReportSaysWhoHoldsWhat) {
  const ProgramOutcome outcome = Tiny("--steps=2 --offload=none --json=" + directory_ + "/json");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, StartsWith("train_gpt: emu:0 ran out of memory in step 1"));
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("--offload=pinion"), HasSubstr("parameters"),
                                 HasSubstr("optimizer state")));
  EXPECT_EQ(Files(), std::vector<std::string>({"text"}));
}

TEST_F(TrainGptTest, WithOffloadTheDefaultLimitSufficesForTheSameLosses) {
  const std::string limited = directory_ + "/limited", unlimited = directory_ + "/unlimited";
  const ProgramOutcome outcome = Tiny("--steps=4 --json=" + limited);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("step 4/4"), HasSubstr("(modelled)"),
                                 HasSubstr("stands for a GPT of width")));
  ASSERT_EQ(
      Tiny("--steps=4 --offload=none --device_memory=unlimited --json=" + unlimited).exit_code, 0);
  EXPECT_EQ(Runs(limited)[0]["losses"], Runs(unlimited)[0]["losses"]);
}

TEST_F(TrainGptTest, AskingForHelpIsNoError) {
  const ProgramOutcome outcome = Run("--help");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.out, HasSubstr("--memory_target"));
}

// Warm-up steps pin host memory, measure the link and are recorded, so their times are not typical.
TEST_F(TrainGptTest, ARunThatIsAllWarmUpReportsNoTimeOfAStep) {
  const ProgramOutcome warm_up = Tiny("--steps=5 --json=" + directory_ + "/json");
  ASSERT_EQ(warm_up.exit_code, 0) << warm_up.err;
  EXPECT_THAT(warm_up.out, AllOf(HasSubstr("not measured: the first 5 steps are warm-up"),
                                 HasSubstr("in the last of 5\n"), Not(HasSubstr("lower")),
                                 Not(HasSubstr("stalled"))));
  EXPECT_EQ(Runs(directory_ + "/json")[0]["measured_steps"], 0);
  for (const char* const time : {"step_ms", "tokens_per_s", "bytes_moved"}) {
    EXPECT_TRUE(Runs(directory_ + "/json")[0][time].is_null()) << time;
  }
  const ProgramOutcome steady = Tiny("--steps=6 --json=" + directory_ + "/json");
  ASSERT_EQ(steady.exit_code, 0) << steady.err;
  EXPECT_THAT(steady.out, HasSubstr("stalled on the link"));
  EXPECT_EQ(Runs(directory_ + "/json")[0]["measured_steps"], 1);
}

TEST_F(TrainGptTest, ThePeakIsTheRunsAndNotThatOfMeasuringTheLink) {
  const std::string path = directory_ + "/json";
  ASSERT_EQ(Tiny("--layers=2 --steps=1 --device_memory=unlimited --json=" + path).exit_code, 0);
  EXPECT_LT(Runs(path)[0]["peak_device_bytes"], 16 << 20) << "what measuring borrows";
}

TEST_F(TrainGptTest, ATargetThatIsNotKeptIsAnErrorOnceAllIsWritten) {
  const ProgramOutcome outcome = Tiny(
      "--steps=8 --device_memory=unlimited --memory_target=6600KiB --json=" + directory_ + "/json");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("--memory_target=6600KiB was not kept"));
  EXPECT_THAT(outcome.out, HasSubstr("step 8/8"));
  EXPECT_EQ(Runs(directory_ + "/json")[0]["losses"].size(), 8u);
}

TEST_F(TrainGptTest, ASignalEndsTheRunAfterTheStepAndAllIsWritten) {
  for (const auto& [signal, exit_code] : std::map<std::string, int>{{"INT", 130}, {"TERM", 143}}) {
    SCOPED_TRACE(signal);
    const ProgramOutcome outcome = SignalAfter(
        "loss", signal,
        absl::StrCat("--steps=1000000 --json=", directory_, "/json --trace=", directory_,
                     "/trace --checkpoint=", directory_, "/checkpoint"));
    EXPECT_EQ(outcome.exit_code, exit_code) << outcome.err;
    EXPECT_THAT(FileContents(directory_ + "/log"), HasSubstr("stopped  by a signal, after step "));
    EXPECT_GE(Runs(directory_ + "/json")[0]["losses"].size(), 1u);
    EXPECT_FALSE(nlohmann::json::parse(FileContents(directory_ + "/trace")).empty());
    EXPECT_EQ(Tiny(absl::StrCat("--steps=1 --resume=", directory_, "/checkpoint")).exit_code, 0);
    std::filesystem::remove(directory_ + "/json");
  }
}

TEST_F(TrainGptTest, AComparisonThatASignalEndsHasTheRunsThatWereComplete) {
  constexpr size_t kAllRuns = 17;
  const auto ends_early = [](const std::string& log) {
    return log.find("a signal has ended the comparison") != std::string::npos;
  };
  size_t steps = 20;
  ProgramOutcome outcome;
  std::string log;
  do {
    // A busy host may send the signal late: after runs that are too short.
    steps *= 2;
    outcome =
        SignalAfter("scaled, blocking", "INT",
                    absl::StrCat("--compare --steps=", steps, " --json=", directory_, "/json"));
    log = FileContents(directory_ + "/log");
  } while (!ends_early(log) && steps < 2000);
  EXPECT_EQ(outcome.exit_code, 130) << outcome.err;
  EXPECT_THAT(log, AllOf(HasSubstr("stopped  by a signal"), HasSubstr("device peak"),
                         HasSubstr("a signal has ended the comparison")));
  const nlohmann::json runs = Runs(directory_ + "/json");
  ASSERT_GE(runs.size(), 1u);
  EXPECT_LT(runs.size(), kAllRuns);
  EXPECT_EQ(runs[0]["name"], "none");
  EXPECT_EQ(runs[0]["repeats_itself"], true);
  for (const nlohmann::json& run : runs) EXPECT_EQ(run["losses"].size(), steps) << run["name"];
}

TEST_F(TrainGptTest, AComparisonWithoutACompleteRunWritesThatThereIsNone) {
  const ProgramOutcome outcome =
      SignalAfter("scaled, none", "TERM",
                  absl::StrCat("--compare --steps=1000000 --json=", directory_, "/json"));
  EXPECT_EQ(outcome.exit_code, 143) << outcome.err;
  EXPECT_THAT(FileContents(directory_ + "/log"),
              AllOf(HasSubstr("stopped  by a signal"), Not(HasSubstr("device peak"))));
  EXPECT_TRUE(Runs(directory_ + "/json").empty());
}

// Checks the claims of the comparison on its default model. Half a batch takes half the time.
TEST_F(TrainGptTest, TheComparisonMeetsItsGoals) {
  const std::string path = directory_ + "/json";
  const ProgramOutcome outcome = Run(absl::StrCat(
      "--device=emu:0 --compare --steps=6 --batch=2 --text=", text_, " --json=", path));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("step (modelled)"), HasSubstr("can hide the transfer"),
                                 HasSubstr("cannot hide the transfer")));

  const nlohmann::json runs = Runs(path);
  const char* const names[] = {
      "none",
      "blocking",
      "pinion",
      "planned",
      "checkpoint",
      "checkpoint+pinion",
      "weights",
      "weights+pinion",
      "none",
      "blocking",
      "pinion",
      "planned",  // gh200_c2c
      "none",
      "blocking",
      "pinion",
      "planned",
      "checkpoint+planned",  // a100_pcie4
  };
  constexpr int kGh200 = 8, kA100 = 12, kRuns = 17;
  ASSERT_EQ(runs.size(), kRuns);
  for (int i = 0; i < kRuns; ++i) {
    SCOPED_TRACE(runs[i]["preset"].get<std::string>() + " " + runs[i]["name"].get<std::string>());
    EXPECT_EQ(runs[i]["name"], names[i]);
    EXPECT_EQ(runs[i]["losses"].size(), 6);
    EXPECT_EQ(runs[i]["losses"], runs[0]["losses"]) << "no preset touches a result";
    const bool is_reference = runs[i]["name"] == "none";
    EXPECT_EQ(runs[i][is_reference ? "repeats_itself" : "bit_identical"], true);
    EXPECT_EQ(runs[i][is_reference ? "bit_identical" : "repeats_itself"], nullptr);
    EXPECT_EQ(runs[i]["pin_calls_after_warmup"], 0);
  }
  const nlohmann::json none = runs[0], blocking = runs[1], pinion = runs[2];
  EXPECT_EQ(none["preset"], "scaled");
  EXPECT_LE(pinion["peak_activation_bytes"], 0.35 * none["peak_activation_bytes"].get<double>());
  EXPECT_LE(pinion["step_ms"], 1.05 * none["step_ms"].get<double>());
  EXPECT_GE(blocking["step_ms"], 1.2 * pinion["step_ms"].get<double>());
  EXPECT_GT(blocking["stall_ms"], pinion["stall_ms"]);
  EXPECT_GT(pinion["bytes_moved"], 0);
  EXPECT_EQ(none["bytes_moved"], 0);
  // Only a window of weights, gradients and optimizer state stays on the device.
  const nlohmann::json weights = runs[6], weights_and_pinion = runs[7];
  EXPECT_LE(weights["peak_device_bytes"], 0.65 * none["peak_device_bytes"].get<double>());
  EXPECT_LE(weights_and_pinion["peak_device_bytes"],
            0.35 * none["peak_device_bytes"].get<double>());
  EXPECT_LE(weights["peak_device_bytes"], weights["two_layers_bytes"].get<uint64_t>() +
                                              none["peak_activation_bytes"].get<uint64_t>());
  EXPECT_LE(weights_and_pinion["peak_device_bytes"],
            weights_and_pinion["two_layers_bytes"].get<uint64_t>() +
                pinion["peak_activation_bytes"].get<uint64_t>());
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("\n  weights: device peak "),
                                 HasSubstr("\n  weights+pinion: device peak ")));
  // Checkpoints trade time for memory. Offloading their inputs costs almost no time.
  const nlohmann::json checkpoint = runs[4], both = runs[5];
  EXPECT_LE(checkpoint["peak_activation_bytes"], 0.5 * none["peak_activation_bytes"].get<double>());
  EXPECT_GT(checkpoint["step_ms"], 1.1 * none["step_ms"].get<double>());
  EXPECT_LT(both["peak_activation_bytes"], checkpoint["peak_activation_bytes"]);
  EXPECT_LE(both["step_ms"], 1.02 * checkpoint["step_ms"].get<double>());
  EXPECT_GT(both["bytes_moved"], 0);
  EXPECT_LT(both["bytes_moved"], pinion["bytes_moved"]);

  // The link of gh200_c2c hides the transfer, that of a100_pcie4 does not.
  EXPECT_LE(runs[kGh200 + 2]["step_ms"], 1.05 * runs[kGh200]["step_ms"].get<double>());
  EXPECT_GT(runs[kA100 + 2]["step_ms"], 1.05 * runs[kA100]["step_ms"].get<double>());
  // Within the same memory a planned step must not be slower than windows.
  for (const int i : {2, kGh200 + 2, kA100 + 2}) {
    SCOPED_TRACE(i);
    EXPECT_LE(runs[i + 1]["peak_device_bytes"], runs[i]["peak_device_bytes"]);
    EXPECT_LE(runs[i + 1]["step_ms"], 1.02 * runs[i]["step_ms"].get<double>());
  }
  // A plan that may recompute blocks must not be slower than one that may not.
  const nlohmann::json mixed = runs[kA100 + 4];
  EXPECT_LE(mixed["peak_device_bytes"], runs[kA100 + 2]["peak_device_bytes"]);
  EXPECT_LE(mixed["step_ms"], 1.001 * runs[kA100 + 3]["step_ms"].get<double>());
  EXPECT_LT(runs[kA100 + 3]["step_ms"], 0.98 * runs[kA100 + 2]["step_ms"].get<double>());
}

// The printed bound is either the sum of the parts or the memory target.
TEST_F(TrainGptTest, StreamedWeightsArePrintedBesideWhatThePeakMayBeAtMost) {
  const std::string path = directory_ + "/json";
  const ProgramOutcome streamed = Tiny(absl::StrCat("--offload_weights --steps=7 --json=", path));
  ASSERT_EQ(streamed.exit_code, 0) << streamed.err;
  EXPECT_THAT(streamed.out, AllOf(HasSubstr("\nbound    device peak "), HasSubstr(", bound "),
                                  HasSubstr("(the two largest layers with their gradients ")));
  const nlohmann::json run = Runs(path)[0];
  EXPECT_GT(run["two_layers_bytes"], 0);
  EXPECT_EQ(run["peak_activation_bytes"], nullptr);
  const ProgramOutcome resident = Tiny(absl::StrCat("--steps=7 --json=", path));
  ASSERT_EQ(resident.exit_code, 0) << resident.err;
  EXPECT_THAT(resident.out, Not(HasSubstr("\nbound ")));
  EXPECT_EQ(run["losses"], Runs(path)[0]["losses"]);
  EXPECT_LE(run["peak_device_bytes"], run["two_layers_bytes"].get<uint64_t>() +
                                          Runs(path)[0]["peak_activation_bytes"].get<uint64_t>());

  const ProgramOutcome within =
      Tiny("--offload_weights --steps=7 --memory_target=2MiB --device_memory=unlimited");
  ASSERT_EQ(within.exit_code, 0) << within.err;
  EXPECT_THAT(within.out, HasSubstr("bound 2 MiB (--memory_target)"));
}

TEST_F(TrainGptTest, TheLossFallsByAFifth) {
  const std::string path = directory_ + "/json";
  ASSERT_EQ(Run("--device=emu:0 --size=tiny --steps=150 --json=" + path).exit_code, 0);
  const std::vector<double> losses = Runs(path)[0]["losses"];
  const auto mean = [](auto first) { return std::accumulate(first, first + 10, 0.0) / 10; };
  EXPECT_LE(mean(losses.end() - 10), 0.8 * mean(losses.begin()));
}

TEST_F(TrainGptTest, PathsAreMeantFromWhereTheCommandWasTyped) {
  setenv("BUILD_WORKING_DIRECTORY", directory_.c_str(), 1);
  const ProgramOutcome outcome = Tiny("--steps=1 --json=here");
  unsetenv("BUILD_WORKING_DIRECTORY");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(Runs(directory_ + "/here").size(), 1);
}

TEST_F(TrainGptTest, TheComparisonRepeatsItsNumbersToTheLastDigit) {
  nlohmann::json runs[2];
  for (nlohmann::json& these : runs) {
    const std::string path = directory_ + "/json";
    ASSERT_EQ(Tiny("--compare --steps=7 --json=" + path).exit_code, 0);
    these = Runs(path);
    for (nlohmann::json& run : these) {
      run.erase("pack_unpack_us");  // wall time
      run.erase("tokens_per_s");
    }
  }
  EXPECT_EQ(runs[0], runs[1]);
}

TEST_F(TrainGptTest, AComparisonNeedsStepsAfterItsWarmUp) {
  const ProgramOutcome outcome = Tiny("--compare --steps=3");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("--steps=3"), HasSubstr("warm-up")));
}

TEST_F(TrainGptTest, ASwitchThatIsOnIsNamedWhereItMatters) {
  const std::string flags = absl::StrCat("--device=emu:0 --size=tiny --steps=6 --text=", text_);
  const ProgramOutcome disabled = Run(flags, "PINION_DISABLE=1");
  EXPECT_EQ(disabled.exit_code, 1);
  EXPECT_THAT(disabled.out, HasSubstr("switches PINION_DISABLE=1"));
  EXPECT_THAT(disabled.err,
              AllOf(HasSubstr("ran out of memory"), HasSubstr("unset PINION_DISABLE")));
  EXPECT_EQ(disabled.err.find("smaller --batch"), std::string::npos) << disabled.err;

  const ProgramOutcome nothing = Run(flags + " --compare", "PINION_DISABLE=1");
  EXPECT_EQ(nothing.exit_code, 1);
  EXPECT_THAT(nothing.err, HasSubstr("nothing to compare with PINION_DISABLE=1"));

  const ProgramOutcome verified = Run(flags + " --compare", "PINION_VERIFY=1");
  EXPECT_EQ(verified.exit_code, 0) << verified.err;
  EXPECT_THAT(verified.out, HasSubstr("measured with PINION_VERIFY=1"));
}

// Readers look first at the second step, which is typical; it starts at time 0.
TEST_F(TrainGptTest, TheTraceShowsStepsWithTheirPartsMemoryAndArrows) {
  const std::string path = directory_ + "/trace";
  ASSERT_EQ(Tiny("--steps=3 --trace=" + path).exit_code, 0);
  const nlohmann::json trace = nlohmann::json::parse(FileContents(path));
  std::map<std::string, std::vector<nlohmann::json>> slices, phases;
  for (const nlohmann::json& event : trace["traceEvents"]) {
    phases[event["ph"]].push_back(event);
    if (event["ph"] == "X") slices[event["name"]].push_back(event);
  }
  ASSERT_EQ(slices["step"].size(), 2);
  EXPECT_NEAR(slices["step"][0]["ts"].get<double>(), 0, 1);
  for (const char* part : {"forward", "backward", "optimizer"}) {
    ASSERT_EQ(slices[part].size(), 2) << part;
    for (int i = 0; i < 2; ++i) {
      const nlohmann::json &step = slices["step"][i], &inside = slices[part][i];
      EXPECT_GE(inside["ts"], step["ts"]) << part;
      EXPECT_LE(inside["ts"].get<double>() + inside["dur"].get<double>(),
                step["ts"].get<double>() + step["dur"].get<double>() + 1e-6)
          << part;
    }
  }
  EXPECT_EQ(slices.count("pin host memory"), 0) << "only the first step pins";
  EXPECT_GT(slices["pinion.pack"].size(), 0);
  EXPECT_GT(phases["C"].size(), 10) << "the memory's graph";
  EXPECT_GT(phases["s"].size(), 0);
  EXPECT_EQ(phases["s"].size(), phases["f"].size());
}

}  // namespace
}  // namespace pinion
