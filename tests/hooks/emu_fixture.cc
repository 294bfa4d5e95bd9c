#include "pinion/tests/hooks/emu_fixture.h"

#include <ATen/Parallel.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/tests/hooks/cpu_kernels.h"

namespace pinion::testing {
namespace {

const char* NameOf(EffectSchedule schedule) {
  switch (schedule) {
    case EffectSchedule::kEarly:
      return "kEarly";
    case EffectSchedule::kLate:
      return "kLate";
    case EffectSchedule::kRandom:
      return "kRandom";
  }
  return "?";
}

// The value among `choices` that the environment variable names; the first if there is none.
template <typename Value>
Value FromEnvironment(const char* variable,
                      const std::vector<std::pair<std::string, Value>>& choices) {
  const char* const given = std::getenv(variable);
  if (given == nullptr) return choices.front().second;
  for (const auto& [name, value] : choices) {
    if (name == given) return value;
  }
  PINION_CHECK(false) << variable << " is \"" << given << "\", which emu_fixture.h does not name";
  return choices.front().second;
}

}  // namespace

EmulatedOptions MachineOptions() {
  const char* const seed = std::getenv("PINION_TEST_SEED");
  return MachineOptions(
      FromEnvironment<EffectSchedule>("PINION_TEST_SCHEDULE",
                                      {{"late", EffectSchedule::kLate},
                                       {"early", EffectSchedule::kEarly},
                                       {"random", EffectSchedule::kRandom}}),
      FromEnvironment<ReuseMode>("PINION_TEST_REUSE", {{"immediate", ReuseMode::kImmediate},
                                                       {"quarantine", ReuseMode::kQuarantine}}),
      seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10));
}

EmulatedOptions MachineOptions(EffectSchedule schedule, ReuseMode reuse, uint64_t seed) {
  EmulatedOptions options;
  options.memory_bytes = 64 * kMiB;
  options.schedule = schedule;
  options.reuse = reuse;
  options.seed = seed;
  return options;
}

OffloadOptions SmallWindows(uint64_t window_bytes) {
  OffloadOptions options;
  options.eviction_window_bytes = window_bytes;
  options.prefetch_window_bytes = window_bytes;
  options.link = AssumedLink();
  options.allocator.segment_bytes = kMiB;
  options.allocator.warn_percent = 100;
  options.allocator.high_percent = 100;
  options.allocator.low_percent = 100;
  return options;
}

std::string Describe(const EmulatedOptions& options) {
  return std::string("schedule ") + NameOf(options.schedule) + ", reuse " +
         (options.reuse == ReuseMode::kImmediate ? "kImmediate" : "kQuarantine") + ", seed " +
         std::to_string(options.seed);
}

bool Soon(const std::function<bool()>& condition) {
  for (int i = 0; i < 10000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

EmuWorld::EmuWorld(const EmulatedOptions& machine, const OffloadOptions& offload)
    : trace_(__FILE__, __LINE__, Describe(machine)) {
  at::set_num_threads(1);
  ChooseCpuKernels();
  machine_ = EmulatedMachine::Create(machine).value();
  absl::Status registered;
  PINION_CHECK(Soon([&] {
    registered = RegisterEmuDevice(machine_);
    return registered.ok();
  })) << registered;
  session_ = NewSession(offload);
}

EmuWorld::~EmuWorld() {
  if (session_ != nullptr) {
    EXPECT_TRUE(Soon([&] { return session_->GetStats().live_handles == 0; }))
        << session_->GetStats().ToString();
  }
}

std::shared_ptr<OffloadSession> EmuWorld::NewSession(const OffloadOptions& offload) {
  return OffloadSession::Create(offload, EmulatedBackend(machine_)).value();
}

c10::Device EmuWorld::device(int index) const {
  return c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
}

c10::Stream EmuWorld::NewStream(int index) const {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1)
      .getNewStream(device(index), /*priority=*/0);
}

OffloadStats EmuWorld::QuietStats() {
  EXPECT_TRUE(Soon([&] { return session_->GetStats().live_handles == 0; }));
  for (int index = 0; index < machine_->device_count(); ++index) {
    EXPECT_TRUE(machine_->SynchronizeDevice(index).ok());
  }
  return session_->GetStats();
}

void EmuWorld::ExpectNothingLeft() {
  const OffloadStats stats = QuietStats();
  EXPECT_EQ(stats.live_handles, 0u) << stats.ToString();
  for (int index = 0; index < machine_->device_count(); ++index) {
    const EngineStats engine = session_->GetEngineStats(index);
    EXPECT_EQ(engine.h2d.in_flight_bytes, 0u);
    EXPECT_EQ(engine.d2h.in_flight_bytes, 0u);
  }
  EXPECT_TRUE(Soon([&] { return session_->GetAllocatorStats().booked_bytes.current == 0; }));
}

}  // namespace pinion::testing
