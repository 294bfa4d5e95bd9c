// Devices that LibTorch computes on, with an offload session on them: an emulated machine that
// LibTorch knows as "emu", or what the environment names.
//
//   EmuWorld world;
//   const TestNet net(world.device(), at::kFloat);
//   TrainStep(net, world.session());
//
// PINION_TEST_DEVICE chooses:
//   emu          the default
//   fake_cuda    LibTorch computes on emu; the session copies through device/cuda, over a fake CUDA
//                runtime on the same machine
//   cuda:0       a GPU. A test that asks for the machine is about the emulated accelerator alone
//                (its virtual time, its race detector, its faults): it skips and says so
//
// A machine takes the place of the one before, so tensors must be gone when the next is made: keep
// what is compared on the CPU.

#ifndef PINION_TESTS_HOOKS_SUPPORT_EMU_FIXTURE_H_
#define PINION_TESTS_HOOKS_SUPPORT_EMU_FIXTURE_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"

namespace pinion::testing {

// A small machine; races are fatal. The environment decides about the order of effects:
// PINION_TEST_SCHEDULE is early, late (the default) or random, PINION_TEST_REUSE is immediate (the
// default) or quarantine, PINION_TEST_SEED is a number. A failure prints what they were.
EmulatedOptions MachineOptions();
// The same, where each copy is stuck for so long that nothing is known to be done while a test
// saves and reads.
EmulatedOptions SlowCopies(double stall_ms = 10);
// For a test that is about one of them.
EmulatedOptions MachineOptions(EffectSchedule schedule, ReuseMode reuse = ReuseMode::kImmediate,
                               uint64_t seed = 1);

// Windows of `window_bytes`, small enough for the test net to overflow them, a link that nobody
// measures, small segments of host memory, and all of the host's RAM, however much others use.
OffloadOptions SmallWindows(uint64_t window_bytes = 16 << 10);
// The same with a memory target and the windows that come with it.
OffloadOptions WithTarget(uint64_t target_bytes);
// Of the tier that both have.
HostTierOptions SmallTier();

// "schedule kRandom, reuse kImmediate, seed 7": for SCOPED_TRACE.
std::string Describe(const EmulatedOptions& options);

class EmuWorld {
 public:
  explicit EmuWorld(const EmulatedOptions& machine = MachineOptions(),
                    const OffloadOptions& offload = SmallWindows());
  // Waits until autograd's workers have let go of what the test has.
  ~EmuWorld();

  // Ends the test as skipped where there is no emulated machine. In the test's own thread only.
  EmulatedMachine& machine();
  // How the session reaches its devices.
  const DeviceBackend& backend() const;
  const std::shared_ptr<OffloadSession>& session() { return session_; }
  std::shared_ptr<OffloadSession> NewSession(const OffloadOptions& offload);
  // The session goes when the graphs that use it do.
  void DropSession() { session_.reset(); }

  // Ends the test as skipped where there are fewer GPUs.
  c10::Device device(int index = 0) const;
  c10::Stream NewStream(int index = 0) const;

  absl::Status Synchronize(int index = 0);
  // In use, and the most since ResetPeak.
  uint64_t device_bytes(int index = 0);
  uint64_t peak_device_bytes(int index = 0);
  void ResetPeak(int index = 0);

  // After waiting for autograd's workers to let go of their last references, and for all copies.
  OffloadStats QuietStats();
  // What should be left after every graph is gone: no handle, nothing in flight, no host block.
  void ExpectNothingLeft();

 private:
  // Where the devices are, and how the session reaches them.
  struct Place;
  static std::unique_ptr<Place> Open(const EmulatedOptions& options);

  const ::testing::ScopedTrace trace_;
  const std::unique_ptr<Place> place_;
  std::shared_ptr<OffloadSession> session_;
};

// Whether PINION_TEST_DEVICE names one.
bool TestsRunOnGpu();

// True once `condition` is, within ten seconds: for what autograd's worker threads let go of a
// moment after backward() has returned.
bool Soon(const std::function<bool()>& condition);

// A backend of the test's own, whose sessions share a tier with nobody: workers of autograd may
// still hold the tier of a test before. Of the emulated accelerator: ends the test as skipped on a
// GPU.
DeviceBackend OwnBackend(std::function<absl::StatusOr<std::shared_ptr<Device>>(int)> device);

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_SUPPORT_EMU_FIXTURE_H_
