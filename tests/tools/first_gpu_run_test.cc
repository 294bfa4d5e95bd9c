// Runs tools/first_gpu_run.sh with programs that hang, crash and fail, as programs on a GPU may.

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/examples/compare.h"
#include "pinion/examples/report.h"
#include "pinion/examples/training_run.h"
#include "pinion/programs/run_options.h"
#include "pinion/tests/support/run_program.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kSucceeds[] = "echo fine";

class FirstGpuRunTest : public ::testing::Test {
 protected:
  FirstGpuRunTest() {
    std::filesystem::remove_all(Folder());
    std::filesystem::create_directories(Folder() + "/bin");
    for (const char* name : {"train_gpt", "bandwidth", "engine_bench", "cuda_gpu_test",
                             "fake_cuda_conformance_test", "offload_gpu_test", "step_bench"}) {
      Program(name, kSucceeds);
    }
  }

  static std::string Folder() { return ::testing::TempDir() + "/first_gpu_run"; }

  static void Program(const std::string& name, const std::string& script) {
    const std::string path = Folder() + "/bin/" + name;
    std::ofstream(path) << "#!/bin/sh\n" << script << "\n";
    ASSERT_EQ(chmod(path.c_str(), 0755), 0);
  }

  static ProgramOutcome Run(const std::string& arguments) {
    return RunProgram(absl::StrCat("PATH=/usr/bin:/bin tools/first_gpu_run.sh --programs=",
                                   Folder(), "/bin --out=", Folder(), "/out ", arguments));
  }

  static nlohmann::json Summary() {
    return nlohmann::json::parse(FileContents(Folder() + "/out/summary.json"));
  }

  // Makes the fake train_gpt write the report of such a comparison and exit accordingly.
  static void TrainGptCompares(bool repeats_itself, std::optional<bool> bit_identical) {
    ComparedGroup group;
    group.name = "cuda:0";
    ComparedRun& alone = group.runs.emplace_back();
    alone.repeats_itself = repeats_itself;
    ComparedRun& offloaded = group.runs.emplace_back();
    offloaded.offload = OffloadMode::kPinion;
    offloaded.bit_identical = bit_identical;
    const std::string json = Folder() + "/compared.json";
    std::ofstream(json) << ToJson({group});
    Program("train_gpt",
            absl::StrCat("for a in \"$@\"; do case $a in --json=*) cp ", json,
                         " \"${a#*=}\";; esac; done; exit ", bit_identical.value_or(true) ? 0 : 1));
  }

  static nlohmann::json CaseNamed(const std::string& name) {
    const nlohmann::json summary = Summary();
    for (const auto& row : summary["cases"]) {
      if (row["name"] == name) return row;
    }
    return nullptr;
  }

  // Returns the verdict of the case named `name`.
  static std::string VerdictOn(const std::string& name) {
    const nlohmann::json row = CaseNamed(name);
    return row.is_null() ? "no such case" : row["verdict"];
  }
};

TEST_F(FirstGpuRunTest, RunsEveryStepAndSaysThatItPassed) {
  TrainGptCompares(/*repeats_itself=*/true, /*bit_identical=*/true);
  const ProgramOutcome outcome = Run("--device=cuda:0");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  for (const char* step :
       {" 1  loader", " 2  device tests", " 3  compute-sanitizer", " 4  link", " 5  training",
        " 6  same bits", " 7  tensors of 512 MiB", " 8  caching allocator",
        " 9  hooks under LibTorch", "10  engine", "11  step by method"}) {
    EXPECT_THAT(outcome.out, HasSubstr(step));
  }
  EXPECT_EQ(FileContents(Folder() + "/out/summary.txt"), outcome.out);
  EXPECT_EQ(Summary()["device"], "cuda:0");
  EXPECT_EQ(VerdictOn("compare"), "passed");
}

TEST_F(FirstGpuRunTest, GoesOnAfterAProgramThatHangs) {
  Program("bandwidth", "echo copying 16 MiB; sleep 1000 & sleep 1000");
  // A loaded machine may take seconds to start the program that passes.
  const ProgramOutcome outcome = Run("--device=cuda:0 --steps=4,10 --limit=10");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.out, HasSubstr("after 10 s; it was saying: copying 16 MiB"));
  EXPECT_EQ(VerdictOn("bandwidth"), "timed-out");
  EXPECT_EQ(VerdictOn("engine_bench"), "passed");
}

TEST_F(FirstGpuRunTest, RefusesALimitThatIsNoWholeSeconds) {
  for (const char* limit : {"0", "0.5", "-1", "soon"}) {
    const ProgramOutcome outcome = Run(absl::StrCat("--device=emu:0 --limit=", limit));
    EXPECT_EQ(outcome.exit_code, 2) << limit;
    EXPECT_THAT(outcome.err, HasSubstr(absl::StrCat("--limit=", limit, ": give whole seconds")));
  }
}

TEST_F(FirstGpuRunTest, KillsWhatIgnoresASignal) {
  Program("bandwidth", "trap '' TERM; while :; do sleep 1; done");
  EXPECT_THAT(Run("--device=emu:0 --steps=4 --limit=1").out, Not(HasSubstr("cannot be killed")));
  EXPECT_EQ(VerdictOn("bandwidth"), "timed-out");
}

TEST_F(FirstGpuRunTest, NamesTheSignalAndTheLastError) {
  Program("bandwidth", "echo 'cudaErrorIllegalAddress in cudaMemcpyAsync'; kill -SEGV $$");
  Program("engine_bench", "echo 'MISSED large copies'; exit 3");
  const ProgramOutcome outcome = Run("--device=cuda:0 --steps=4,10");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("signal 11: cudaErrorIllegalAddress in cudaMemcpyAsync"),
                                 HasSubstr("exit code 3: MISSED large copies")));
}

TEST_F(FirstGpuRunTest, RunsTheSuitesOfAProgramEachByItselfAndNamesThoseThatFail) {
  const auto suites = [](const char* body) {
    Program(
        "hooks_tests",
        absl::StrCat("case $1 in --gtest_list_tests) echo 'One.'; echo '  A'; echo 'Two/Kinds.'; "
                     "exit;; esac; echo '[  PASSED  ] 0 tests.'; ",
                     body));
  };
  std::filesystem::create_directories(Folder() + "/share");
  suites("true");
  EXPECT_EQ(Run("--device=cuda:0 --steps=9").exit_code, 0);
  EXPECT_EQ(VerdictOn("hooks_tests"), "passed");
  EXPECT_THAT(CaseNamed("hooks_tests")["note"], HasSubstr("2 suites"));
  suites("[ \"$1\" != --gtest_filter=Two/Kinds.* ]");
  EXPECT_EQ(Run("--device=cuda:0 --steps=9").exit_code, 1);
  EXPECT_EQ(VerdictOn("hooks_tests"), "failed");
  EXPECT_THAT(CaseNamed("hooks_tests")["note"],
              AllOf(HasSubstr("Two/Kinds."), Not(HasSubstr("One"))));
  Program("hooks_tests", "exit 127");
  Run("--device=cuda:0 --steps=9");
  EXPECT_EQ(VerdictOn("hooks_tests"), "failed") << "it lists no suites";
  Run("--device=emu:0 --steps=9");
  EXPECT_EQ(VerdictOn("hooks_tests"), "no such case") << "its tests have programs of their own";
}

TEST_F(FirstGpuRunTest, AMissingLibraryIsALoaderFailureAndHelpIsNot) {
  Program("train_gpt",
          "echo 'train_gpt: error while loading shared libraries: libx.so' >&2; exit 127");
  Program("bandwidth", "echo usage; exit 1");
  Program("engine_bench",
          "echo 'engine_bench: python3 finds no torch; set TORCH_PATH' >&2; exit 127");
  Program("step_bench", "echo 'symbol lookup error: libx.so: undefined symbol: y' >&2; exit 127");
  Program("offload_gpu_test", "exit 127");
  Run("--device=emu:0 --steps=1");
  EXPECT_EQ(VerdictOn("train_gpt"), "failed");
  EXPECT_EQ(VerdictOn("bandwidth"), "passed");
  EXPECT_THAT(CaseNamed("engine_bench")["note"], HasSubstr("set TORCH_PATH"));
  EXPECT_THAT(CaseNamed("step_bench")["note"], HasSubstr("undefined symbol: y"));
  EXPECT_THAT(CaseNamed("offload_gpu_test")["note"], HasSubstr("exit code 1")) << "kept";
}

TEST_F(FirstGpuRunTest, TwoCudaRuntimesAreFoundOnceLibTorchHasLoadedItsOwn) {
  Program("train_gpt",
          "[ -z \"$LD_DEBUG_OUTPUT\" ] || for l in /a /b; do "
          "echo \"calling init: $l/libcudart.so.13\"; done >$LD_DEBUG_OUTPUT.$$");
  const ProgramOutcome outcome = Run("--device=cuda:0 --steps=5");
  EXPECT_EQ(VerdictOn("none"), "failed") << outcome.out;
  EXPECT_THAT(CaseNamed("none")["note"], HasSubstr("/a/libcudart.so.13 /b/libcudart.so.13"));
  EXPECT_EQ(VerdictOn("pinion"), "passed");
}

TEST_F(FirstGpuRunTest, AGoalThatIsMissedFailsOnAGpuOnly) {
  Program("engine_bench", "echo 'MISSED  Submit: 900 (goal <= 500)'; exit 1");
  EXPECT_EQ(Run("--device=emu:0 --steps=10").exit_code, 0);
  EXPECT_EQ(VerdictOn("engine_bench"), "missed");
  EXPECT_EQ(CaseNamed("engine_bench")["note"], "Submit: 900 (goal <= 500)");
  EXPECT_EQ(Run("--device=cuda:0 --steps=10").exit_code, 1);
  EXPECT_EQ(VerdictOn("engine_bench"), "missed");
}

TEST_F(FirstGpuRunTest, TheSummaryIsJsonWhateverAProgramPrints) {
  Program("bandwidth", R"(printf 'error: "\\x" \303\344\t\001 \377 end'; exit 3)");
  Run("--device=cuda:0 --steps=4");
  EXPECT_EQ(VerdictOn("bandwidth"), "failed");
  EXPECT_THAT(CaseNamed("bandwidth")["note"], AllOf(HasSubstr("error: x"), HasSubstr("end")));
}

TEST_F(FirstGpuRunTest, AnotherGpuIsTheOnlyOneThatTheProgramsSee) {
  Program("bandwidth", "echo \"GPUs $CUDA_VISIBLE_DEVICES\"; exit 3");
  Run("--device=cuda:2 --steps=4");
  EXPECT_EQ(Summary()["device"], "cuda:2");
  EXPECT_THAT(CaseNamed("bandwidth")["note"], HasSubstr("GPUs 2"));
  setenv("CUDA_VISIBLE_DEVICES", "4,7", 1);
  Run("--device=cuda:1 --steps=4");
  EXPECT_THAT(CaseNamed("bandwidth")["note"], HasSubstr("GPUs 7"));
  const ProgramOutcome outcome = Run("--device=cuda:2 --steps=4");
  unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("CUDA_VISIBLE_DEVICES=4,7 has no such device"));
}

TEST_F(FirstGpuRunTest, RefusesAStepThatThereIsNot) {
  for (const char* steps : {"12", "two", "1,,2", "01", ","}) {
    const ProgramOutcome outcome = Run(absl::StrCat("--steps=", steps));
    EXPECT_EQ(outcome.exit_code, 2) << steps;
    EXPECT_THAT(outcome.err, HasSubstr("the steps are 1 to 11"));
  }
}

TEST_F(FirstGpuRunTest, DifferentBitsAreAFailureAndAReferenceThatDoesNotRepeatItselfIsNot) {
  TrainGptCompares(/*repeats_itself=*/true, /*bit_identical=*/false);
  EXPECT_EQ(Run("--device=cuda:0 --steps=6").exit_code, 1);
  EXPECT_EQ(VerdictOn("compare"), "failed");
  EXPECT_THAT(CaseNamed("compare")["note"], HasSubstr("differ from those without offload"));
  TrainGptCompares(/*repeats_itself=*/false, /*bit_identical=*/std::nullopt);
  EXPECT_EQ(Run("--device=cuda:0 --steps=6").exit_code, 0);
  EXPECT_EQ(VerdictOn("compare"), "unknown");
}

TEST_F(FirstGpuRunTest, ATestThatSkippedDidNotPass) {
  Program("offload_gpu_test",
          "echo '[  SKIPPED ] X.Y'; echo '[  PASSED  ] 0 tests.'; echo '[  SKIPPED ] 1 test'");
  EXPECT_EQ(Run("--device=cuda:0 --steps=9").exit_code, 0);
  EXPECT_EQ(VerdictOn("offload_gpu_test"), "skipped");
}

TEST_F(FirstGpuRunTest, StopsWhenTheDeviceNoLongerAnswers) {
  Program("nvidia-smi", "[ $# -gt 0 ]");
  Program("bandwidth", "kill -KILL $$");
  const ProgramOutcome outcome = RunProgram(absl::StrCat(
      "PATH=", Folder(), "/bin:/usr/bin:/bin tools/first_gpu_run.sh --programs=", Folder(),
      "/bin --out=", Folder(), "/out --device=cuda:0 --steps=4,10"));
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(VerdictOn("engine_bench"), "not-run");
}

TEST_F(FirstGpuRunTest, RefusesADeviceThatItDoesNotKnow) {
  const ProgramOutcome outcome = Run("--device=tpu:0");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("--device=tpu:0 is neither cuda:N nor emu:0"));
}

}  // namespace
}  // namespace pinion::testing
