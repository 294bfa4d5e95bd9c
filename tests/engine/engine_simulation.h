// Runs random programs on two devices with three streams each, and checks all bytes by a model.
//
// A program follows the engine's contract: it waits for a transfer on the stream that uses the
// tensor next. The engine must order everything else: copies of other streams and devices on the
// same host buffer, and the reuse of blocks. Under every legal execution order the bytes must be
// those of the program's own order, without races.
//
// The seed chooses the program and its world: effect schedule, memory reuse, chunk sizes (down to
// 256 bytes), transient faults, and slow copies and kernels. Some worlds have a device
// that fails permanently or a stream that is stuck forever. The simulation then checks:
//
//   an error        nothing of the failed batch is written later: each byte is the old or the new
//                   one, and does not change again
//   a lost device   every call reports it, host bytes that had arrived remain, its blocks are never
//                   reused, and the other device continues
//   a stuck stream  no wait exceeds its deadline, and the error names a submission
//
//   const SimulationResult result = SimulateEngine(seed);
//   ASSERT_EQ(result.failure, "");
//
// Thread safety: one simulation at a time in a process, because it redirects the log.

#ifndef PINION_TESTS_ENGINE_ENGINE_SIMULATION_H_
#define PINION_TESTS_ENGINE_ENGINE_SIMULATION_H_

#include <cstdint>
#include <string>

namespace pinion::testing {

struct SimulationResult {
  std::string failure;  // "" if every check passed
  uint64_t operations = 0;
  uint64_t transfers = 0;
  uint64_t chunks = 0;
  uint64_t retries = 0;         // by the engines
  uint64_t failed_submits = 0;  // returned an error
  bool lost_device = false;     // failed permanently
  bool stuck_device = false;
};

SimulationResult SimulateEngine(uint64_t seed);

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_ENGINE_SIMULATION_H_
