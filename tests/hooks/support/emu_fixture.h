// Provides devices with an offload session: an emulated machine, registered with LibTorch as "emu",
// or the devices that the environment selects.
//
//   EmuWorld world;
//   const TestNet net(world.device(), at::kFloat);
//   TrainStep(net, world.session());
//
// PINION_TEST_DEVICE chooses:
//   emu          the default
//   fake_cuda    LibTorch computes on emu; the session copies through device/cuda, over a fake CUDA
//                runtime on the same machine
//   cuda:0       a GPU. Tests that need the machine (virtual time, race detector, faults) are
//                skipped with a message
//
// A new machine replaces the last one, whose tensors must be destroyed: keep results on the CPU.

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

// Returns a small machine on which races are fatal. The environment sets the order of effects:
// PINION_TEST_SCHEDULE is early, late (the default) or random, PINION_TEST_REUSE is immediate (the
// default) or quarantine, PINION_TEST_SEED is a number. Failures print the values.
EmulatedOptions MachineOptions();
// Returns a machine whose copies stall so long that none completes while a test saves and reads.
EmulatedOptions SlowCopies(double stall_ms = 10);
// Returns a machine with a fixed schedule, for tests about it.
EmulatedOptions MachineOptions(EffectSchedule schedule, ReuseMode reuse = ReuseMode::kImmediate,
                               uint64_t seed = 1);

// Returns options for the test net: windows of `window_bytes`, which it overflows, an assumed link
// and small host segments. Other programs' use of the host's RAM does not matter.
OffloadOptions SmallWindows(uint64_t window_bytes = 16 << 10);
// Returns the same with a memory target and automatic windows.
OffloadOptions WithTarget(uint64_t target_bytes);
// Returns the tier's part of these options.
HostTierOptions SmallTier();

// Returns "schedule kRandom, reuse kImmediate, seed 7", for SCOPED_TRACE.
std::string Describe(const EmulatedOptions& options);

class EmuWorld {
 public:
  explicit EmuWorld(const EmulatedOptions& machine = MachineOptions(),
                    const OffloadOptions& offload = SmallWindows());
  // Waits until autograd's workers have released the test's objects.
  ~EmuWorld();

  // Skips the test if there is no emulated machine. Call it on the test's own thread.
  EmulatedMachine& machine();
  // The backend of the session's devices.
  const DeviceBackend& backend() const;
  const std::shared_ptr<OffloadSession>& session() { return session_; }
  std::shared_ptr<OffloadSession> NewSession(const OffloadOptions& offload);
  // Drops the fixture's reference; graphs keep the session alive while they use it.
  void DropSession() { session_.reset(); }

  // Skips the test if there are fewer GPUs.
  c10::Device device(int index = 0) const;
  c10::Stream NewStream(int index = 0) const;

  absl::Status Synchronize(int index = 0);
  // Return the bytes in use, and the peak since ResetPeak.
  uint64_t device_bytes(int index = 0);
  uint64_t peak_device_bytes(int index = 0);
  void ResetPeak(int index = 0);

  // Waits for autograd's workers and for all copies, and returns the statistics.
  OffloadStats QuietStats();
  // Expects no handles, pending copies or host blocks, which all end with the graphs.
  void ExpectNothingLeft();

 private:
  // The devices, and the session's way to reach them.
  struct Place;
  static std::unique_ptr<Place> Open(const EmulatedOptions& options);

  const ::testing::ScopedTrace trace_;
  const std::unique_ptr<Place> place_;
  std::shared_ptr<OffloadSession> session_;
};

// Returns whether PINION_TEST_DEVICE names a GPU.
bool TestsRunOnGpu();

// Waits up to a minute for `condition`, for example until autograd's workers release references
// shortly after backward() has returned. Returns whether it came true.
bool Soon(const std::function<bool()>& condition);

// Returns a backend whose sessions share no tier: autograd's workers may still hold the tier of an
// earlier test. Skips the test on a GPU.
DeviceBackend OwnBackend(std::function<absl::StatusOr<std::shared_ptr<Device>>(int)> device);

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_SUPPORT_EMU_FIXTURE_H_
