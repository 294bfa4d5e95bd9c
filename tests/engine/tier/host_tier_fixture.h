// Host tiers of one process: an emulated machine with two devices, and a source for their pool.

#ifndef PINION_TESTS_ENGINE_TIER_HOST_TIER_FIXTURE_H_
#define PINION_TESTS_ENGINE_TIER_HOST_TIER_FIXTURE_H_

#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"

namespace pinion::testing {

inline EmulatedOptions TwoDevices() {
  EmulatedOptions options = TestMachineOptions();
  options.device_count = 2;
  return options;
}

inline HostTierOptions SmallOptions() {
  HostTierOptions options;
  options.allocator.segment_bytes = 4 * kMiB;
  return options;
}

using TierOrError = absl::StatusOr<std::shared_ptr<HostTier>>;

class HostTierTest : public ::testing::Test {
 protected:
  TierOrError OfProcess(const HostTierOptions& options = SmallOptions(),
                        std::shared_ptr<PinnedAllocator> pool = nullptr) {
    return HostTier::OfProcess(options, EmulatedBackend(machine_), source_, std::move(pool));
  }
  std::shared_ptr<PinnedAllocator> NewPool() {
    return PinnedAllocator::Create(SmallOptions().allocator, source_, FakeHost().Probe()).value();
  }

  const std::shared_ptr<EmulatedMachine> machine_ = EmulatedMachine::Create(TwoDevices()).value();
  // 8 KiB permit a larger alignment.
  const std::shared_ptr<FakeSource> source_ = std::make_shared<FakeSource>(8 * kKiB);
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_TIER_HOST_TIER_FIXTURE_H_
