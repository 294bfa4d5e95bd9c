// An emulated machine that LibTorch knows as "emu", with an offload session on it.
//
//   EmuWorld world;
//   const TestNet net(world.device(), at::kFloat);
//   TrainStep(net, world.session());
//
// A machine takes the place of the one before, so tensors must be gone when the next is made: keep
// what is compared on the CPU.

#ifndef PINION_TESTS_HOOKS_EMU_FIXTURE_H_
#define PINION_TESTS_HOOKS_EMU_FIXTURE_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/offload_options.h"
#include "pinion/hooks/offload_session.h"
#include "pinion/hooks/offload_stats.h"

namespace pinion::testing {

// A small machine; races are fatal. The environment decides about the order of effects:
// PINION_TEST_SCHEDULE is early, late (the default) or random, PINION_TEST_REUSE is immediate (the
// default) or quarantine, PINION_TEST_SEED is a number. A failure prints what they were.
EmulatedOptions MachineOptions();
// For a test that is about one of them.
EmulatedOptions MachineOptions(EffectSchedule schedule, ReuseMode reuse = ReuseMode::kImmediate,
                               uint64_t seed = 1);

// Windows of `window_bytes`, small enough for the test net to overflow them, a link that nobody
// measures, small segments of host memory, and all of the host's RAM, however much others use.
OffloadOptions SmallWindows(uint64_t window_bytes = 16 << 10);

// "schedule kRandom, reuse kImmediate, seed 7": for SCOPED_TRACE.
std::string Describe(const EmulatedOptions& options);

class EmuWorld {
 public:
  explicit EmuWorld(const EmulatedOptions& machine = MachineOptions(),
                    const OffloadOptions& offload = SmallWindows());
  // Waits until autograd's workers have let go of what the test has.
  ~EmuWorld();

  EmulatedMachine& machine() { return *machine_; }
  const std::shared_ptr<OffloadSession>& session() { return session_; }
  std::shared_ptr<OffloadSession> NewSession(const OffloadOptions& offload);
  // The session goes when the graphs that use it do.
  void DropSession() { session_.reset(); }

  c10::Device device(int index = 0) const;
  c10::Stream NewStream(int index = 0) const;

  // After waiting for autograd's workers to let go of their last references, and for all copies.
  OffloadStats QuietStats();
  // What should be left after every graph is gone: no handle, nothing in flight, no host block.
  void ExpectNothingLeft();

 private:
  const ::testing::ScopedTrace trace_;
  std::shared_ptr<EmulatedMachine> machine_;
  std::shared_ptr<OffloadSession> session_;
};

// True once `condition` is, within ten seconds: for what autograd's worker threads let go of a
// moment after backward() has returned.
bool Soon(const std::function<bool()>& condition);

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_EMU_FIXTURE_H_
