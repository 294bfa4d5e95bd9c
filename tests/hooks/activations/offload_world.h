// A session, and nodes that save tensors of given sizes in its scopes, for tests that count
// offloads.
//
//   OffloadWorld world(SmallWindows(64 * kKiB));
//   world.Save({32, 64}).backward();
//   EXPECT_EQ(world.stats().offloaded, 2u);

#ifndef PINION_TESTS_HOOKS_ACTIVATIONS_OFFLOAD_WORLD_H_
#define PINION_TESTS_HOOKS_ACTIVATIONS_OFFLOAD_WORLD_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {

// Sizes of a tensor of `kib` KiB; 32 KiB fill a copy on SmallWindows()'s link.
inline std::vector<int64_t> KiB(int64_t kib) { return {kib * 256}; }

class OffloadWorld : public EmuWorld {
 public:
  explicit OffloadWorld(const OffloadOptions& options,
                        const EmulatedOptions& machine = MachineOptions())
      : EmuWorld(machine, options) {}

  OffloadStats stats() { return session()->GetStats(); }
  // Returns the stream waits, including those that need no call because the work is done.
  uint64_t waits() {
    const EngineStats engine = session()->GetEngineStats(0);
    return engine.event_waits + engine.event_waits_skipped;
  }
  // Returns the bytes in use after all submitted work.
  uint64_t device_bytes() {
    EXPECT_THAT(machine().SynchronizeDevice(0), IsOk());
    return machine().memory_stats(0).in_use_bytes;
  }
  void LeaveRoom(uint64_t size_bytes) {
    EXPECT_THAT(machine().SetMemoryLimit(0, device_bytes() + size_bytes), IsOk());
  }
  at::Tensor activation(int64_t kib, int first = 0) { return Activation(carrier, KiB(kib), first); }
  // Saves by a node per size in KiB, in a scope of their own.
  at::Tensor Save(const std::vector<int64_t>& kib) {
    const OffloadScope scope(session());
    at::Tensor y = carrier;
    for (const int64_t size : kib) y = Probe(y, {activation(size)}, Use);
    return y;
  }
  static at::Tensor Use(const at::Tensor& grad, const UnpackSaved& unpack) {
    at::mul(unpack()[0], 2);
    return grad;
  }

  at::Tensor carrier = at::ones({1}, at::TensorOptions(device())).requires_grad_(true);
};

// Returns options that offload even tensors of one byte.
inline OffloadOptions EverySize(uint64_t window_bytes) {
  OffloadOptions options = SmallWindows(window_bytes);
  options.min_offload_bytes = 1;
  return options;
}

inline at::Tensor OneByte(OffloadWorld& world) {
  return at::ones({1}, at::TensorOptions(world.device()).dtype(at::kByte));
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_ACTIVATIONS_OFFLOAD_WORLD_H_
