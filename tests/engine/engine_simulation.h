// Random programs on two devices with three streams each, against a model of what every byte must
// be.
//
// A program follows the engine's contract: it waits for a transfer on the stream that uses the
// tensor next, and leaves everything else (copies of other streams and of the other device on the
// same host buffer, reuse of blocks) to the engine. Then whatever order the emulated accelerator
// picks, the bytes are those of the program's own order, and nothing races.
//
// The seed draws the program and its world: when copies take effect, how memory is reused, how
// large the windows are (down to chunks of a few bytes), which device calls fail for the moment,
// which copies and kernels are slow, and sometimes a device that fails for good or a stream that is
// stuck for ever. What is claimed then:
//
//   an error        nothing of the failed batch is written later: each byte is the old or the new
//                   one, and stays
//   a lost device   every call says so, host bytes that had arrived stay, its blocks are never
//                   reused, and the other device goes on
//   a stuck stream  no wait outlasts its deadline, and the error names a submission
//
//   const SimulationResult result = SimulateEngine(seed);
//   ASSERT_EQ(result.failure, "");
//
// Thread safety: one at a time in a process (the log is redirected meanwhile).

#ifndef PINION_TESTS_ENGINE_ENGINE_SIMULATION_H_
#define PINION_TESTS_ENGINE_ENGINE_SIMULATION_H_

#include <cstdint>
#include <string>

namespace pinion::testing {

struct SimulationResult {
  std::string failure;  // "" if every claim held
  uint64_t operations = 0;
  uint64_t transfers = 0;
  uint64_t chunks = 0;
  uint64_t flow_control_waits = 0;
  uint64_t retries = 0;         // by the engines
  uint64_t failed_submits = 0;  // returned an error
  bool lost_device = false;     // failed for good
  bool stuck_device = false;
};

SimulationResult SimulateEngine(uint64_t seed);

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_ENGINE_SIMULATION_H_
