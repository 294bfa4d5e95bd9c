// Runs random lists of 20,000 operations each until `--operations` were done, or lists from files,
// such as a fuzzer's findings.
//
//   bazel run --config=asan //tests/allocator:run_operations -- --operations=10000000 --first=1
//   bazel run --config=tsan //tests/allocator:run_operations -- --operations=10000000 --threads=4
//   bazel run //tests/allocator:run_operations -- crash-1f5d
//
// Prints each list's seed before it runs, so that the last line names the list that crashed.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "pinion/tests/allocator/allocator_operations.h"

ABSL_FLAG(uint64_t, operations, 1000000, "how many, at least");
ABSL_FLAG(uint64_t, first, 1, "the first list's seed");
ABSL_FLAG(int, threads, 1, "lists that run at a time, on one allocator");

namespace {

using pinion::testing::OperationList;
using pinion::testing::OperationsResult;

constexpr uint64_t kOperationsPerList = 20000;

// Prints the failure, if any, and returns whether all checks passed.
bool Holds(const OperationsResult& result) {
  if (!result.failure.empty()) std::printf("%s\n", result.failure.c_str());
  return result.failure.empty();
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  for (size_t i = 1; i < arguments.size(); ++i) {
    std::ifstream file(arguments[i], std::ios::binary);
    std::printf("%s\n", arguments[i]);
    std::fflush(stdout);
    const OperationList list{std::istreambuf_iterator<char>(file),
                             std::istreambuf_iterator<char>()};
    if (!Holds(pinion::testing::RunOperations({list}))) return 1;
  }
  if (arguments.size() > 1) return 0;

  const auto start = std::chrono::steady_clock::now();
  OperationsResult sum;
  uint64_t seed = absl::GetFlag(FLAGS_first);
  while (sum.operations < absl::GetFlag(FLAGS_operations)) {
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    std::vector<OperationList> lists;
    for (int i = 0; i < absl::GetFlag(FLAGS_threads); ++i) {
      lists.push_back(pinion::testing::RandomOperations(seed++, kOperationsPerList));
    }
    const OperationsResult result = pinion::testing::RunOperations(lists);
    if (!Holds(result)) return 1;
    sum.Add(result);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf(
      "seeds %llu to %llu in %.0f s: %llu operations, %llu allocations, %llu refusals, "
      "%llu releases with open tickets, %llu reuses of such bytes, %llu releases on another "
      "thread; every claim held\n",
      static_cast<unsigned long long>(absl::GetFlag(FLAGS_first)),
      static_cast<unsigned long long>(seed - 1), seconds.count(),
      static_cast<unsigned long long>(sum.operations),
      static_cast<unsigned long long>(sum.allocations),
      static_cast<unsigned long long>(sum.refusals),
      static_cast<unsigned long long>(sum.deferred_releases),
      static_cast<unsigned long long>(sum.reuses), static_cast<unsigned long long>(sum.crossings));
  return 0;
}
