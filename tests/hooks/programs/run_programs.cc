// Runs random programs with and without offload, or one that is given, and minimises those that
// fail.
//
//   bazel run --config=opt //tests/hooks/programs:run_programs -- --seeds=20000 --first=1
//   bazel run --config=opt //tests/hooks/programs:run_programs -- --program="session 1; r0 =
//   sin(r0, r0, 0)"
//
// Prints each seed before it runs: the last line is the one to look at when it dies. Exits with 1
// where a program fails.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/status/statusor.h"
#include "pinion/tests/hooks/programs/minimise.h"
#include "pinion/tests/hooks/programs/program.h"
#include "pinion/tests/hooks/programs/run_program.h"

ABSL_FLAG(int, seeds, 500, "how many programs");
ABSL_FLAG(int, first, 1, "the first one's seed");
ABSL_FLAG(std::string, program, "", "the one to run instead, as a failure prints it");
ABSL_FLAG(bool, minimise, true, "those that fail");
ABSL_FLAG(int, failures, 1, "how many end the run");

namespace {

using pinion::testing::FailureKind;
using pinion::testing::Program;
using pinion::testing::Verdict;

bool Fails(const Program& program, const std::string& name) {
  const Verdict verdict = pinion::testing::RunProgram(program);
  if (verdict.kind == FailureKind::kNone) return false;
  std::printf("%s: %s\n", name.c_str(), verdict.ToString().c_str());
  std::fflush(stdout);
  if (absl::GetFlag(FLAGS_minimise)) {
    std::printf("%s\n", pinion::testing::DescribeMinimal(program, verdict).c_str());
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  if (const std::string text = absl::GetFlag(FLAGS_program); !text.empty()) {
    const absl::StatusOr<Program> program = Program::Parse(text);
    if (!program.ok()) {
      std::printf("%s\n", program.status().ToString().c_str());
      return 1;
    }
    return Fails(*program, "the program") ? 1 : 0;
  }
  const auto start = std::chrono::steady_clock::now();
  int failures = 0;
  const int first = absl::GetFlag(FLAGS_first), end = first + absl::GetFlag(FLAGS_seeds);
  int seed = first;
  for (; seed < end && failures < absl::GetFlag(FLAGS_failures); ++seed) {
    std::printf("seed %d\r", seed);
    std::fflush(stdout);
    failures += Fails(Program::Draw(static_cast<uint64_t>(seed)), "seed " + std::to_string(seed));
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("seeds %d to %d in %.0f s: %d failed\n", first, seed - 1, seconds.count(), failures);
  return failures == 0 ? 0 : 1;
}
