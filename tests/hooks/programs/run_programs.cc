// Runs random programs with and without offload, or one that is given, and minimises those that
// fail.
//
//   bazel run --config=opt //tests/hooks/programs:run_programs -- --seeds=20000 --first=1
//   bazel run --config=opt //tests/hooks/programs:run_programs --
//       --program="session 1; r0 = sin(r0, r0, 0)"
//   # to leave out what fails:
//   ... -- --seeds=1000 --set="optimizer 0; verify 0" --without=rrelu,custom
//
// Prints each seed before it runs: the last line is the one to look at when it dies. Prints which
// programs had more than their target and may, and exits with 1 where one fails.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "pinion/allocator/base/check.h"
#include "pinion/tests/hooks/programs/minimise.h"
#include "pinion/tests/hooks/programs/program.h"
#include "pinion/tests/hooks/programs/run_program.h"

ABSL_FLAG(int, seeds, 500, "how many programs");
ABSL_FLAG(int, first, 1, "the first one's seed");
ABSL_FLAG(std::string, program, "", "the one to run instead, as a failure prints it");
ABSL_FLAG(std::string, set, "", "settings of all programs, in place of random ones");
ABSL_FLAG(std::vector<std::string>, without, {}, "operators that are removed from all programs");
ABSL_FLAG(bool, minimise, true, "those that fail");
ABSL_FLAG(int, failures, 1, "how many end the run");

namespace {

using pinion::testing::FailureKind;
using pinion::testing::NameOf;
using pinion::testing::Op;
using pinion::testing::Program;
using pinion::testing::Verdict;

Program Draw(int seed) {
  Program program = Program::Draw(static_cast<uint64_t>(seed));
  const std::vector<std::string> without = absl::GetFlag(FLAGS_without);
  std::erase_if(program.ops, [&](const Op& op) {
    return std::find(without.begin(), without.end(), NameOf(op.kind)) != without.end();
  });
  PINION_CHECK(program.Add(absl::GetFlag(FLAGS_set)).ok()) << absl::GetFlag(FLAGS_set);
  return program;
}

struct Counts {
  int refused = 0;       // programs with tensors for which the host had no room
  int idle_weights = 0;  // whose limit begins with the first saved tensor
};

bool Fails(const Program& program, const std::string& name, Counts& counts) {
  const Verdict verdict = pinion::testing::RunProgram(program);
  counts.refused += verdict.refusals > 0 ? 1 : 0;
  counts.idle_weights += verdict.has_limit_from_first_save ? 1 : 0;
  if (verdict.kind == FailureKind::kNone && verdict.what.empty()) return false;
  std::printf("%s: %s\n", name.c_str(), verdict.ToString().c_str());
  std::fflush(stdout);
  if (verdict.kind == FailureKind::kNone) return false;
  if (absl::GetFlag(FLAGS_minimise)) {
    std::printf("%s\n", pinion::testing::DescribeMinimal(program, verdict).c_str());
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  Counts counts;
  if (const std::string text = absl::GetFlag(FLAGS_program); !text.empty()) {
    Program program;
    PINION_CHECK(program.Add(text).ok()) << text;
    return Fails(program, "the program", counts) ? 1 : 0;
  }
  const auto start = std::chrono::steady_clock::now();
  int failures = 0;
  const int first = absl::GetFlag(FLAGS_first), end = first + absl::GetFlag(FLAGS_seeds);
  int seed = first;
  for (; seed < end && failures < absl::GetFlag(FLAGS_failures); ++seed) {
    std::printf("seed %d\r", seed);
    std::fflush(stdout);
    failures += Fails(Draw(seed), "seed " + std::to_string(seed), counts);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf(
      "seeds %d to %d in %.0f s: %d failed; the host had no room in %d; the limit began with the "
      "first saved tensor in %d\n",
      first, seed - 1, seconds.count(), failures, counts.refused, counts.idle_weights);
  return failures == 0 ? 0 : 1;
}
