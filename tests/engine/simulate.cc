// Runs many seeds of the engine simulation on one thread. Several processes can use more cores.
//
//   bazel run -c opt //tests/engine:simulate -- --first=1 --seeds=50000
//
// Exits with 1 and prints the failure with its seed, or prints a summary.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "pinion/tests/engine/engine_simulation.h"

namespace {

// Returns the value of --name=value, or `otherwise`.
uint64_t Flag(int argc, char** argv, const char* name, uint64_t otherwise) {
  for (int i = 1; i < argc; ++i) {
    const size_t length = std::strlen(name);
    if (std::strncmp(argv[i], name, length) == 0 && argv[i][length] == '=') {
      return std::strtoull(argv[i] + length + 1, nullptr, 10);
    }
  }
  return otherwise;
}

}  // namespace

int main(int argc, char** argv) {
  using pinion::testing::SimulationResult;
  const uint64_t first = Flag(argc, argv, "--first", 1);
  const uint64_t seeds = Flag(argc, argv, "--seeds", 1000);
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [start] {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    return passed.count();
  };
  SimulationResult sum;
  uint64_t lost = 0;
  uint64_t stuck = 0;
  for (uint64_t done = 0; done < seeds; ++done) {
    const SimulationResult result = pinion::testing::SimulateEngine(first + done);
    if (!result.failure.empty()) {
      std::printf("seed %llu: %s\n", static_cast<unsigned long long>(first + done),
                  result.failure.c_str());
      return 1;
    }
    sum.operations += result.operations;
    sum.transfers += result.transfers;
    sum.chunks += result.chunks;
    sum.failed_submits += result.failed_submits;
    lost += result.lost_device ? 1 : 0;
    stuck += result.stuck_device ? 1 : 0;
    if ((done + 1) % 1000 == 0) {
      std::fprintf(stderr, "%llu of %llu seeds, %.0f s\n",
                   static_cast<unsigned long long>(done + 1),
                   static_cast<unsigned long long>(seeds), seconds());
    }
  }
  std::printf(
      "%llu seeds from %llu in %.0f s: %llu operations, %llu transfers in %llu chunks, "
      "%llu failed submits, %llu lost devices, %llu stuck ones; every claim held\n",
      static_cast<unsigned long long>(seeds), static_cast<unsigned long long>(first), seconds(),
      static_cast<unsigned long long>(sum.operations),
      static_cast<unsigned long long>(sum.transfers), static_cast<unsigned long long>(sum.chunks),
      static_cast<unsigned long long>(sum.failed_submits), static_cast<unsigned long long>(lost),
      static_cast<unsigned long long>(stuck));
  return 0;
}
