#include "pinion/tests/hooks/support/emu_fixture.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/programs/accelerator.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/hooks/support/cpu_kernels.h"

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

// cudaHostAlloc rounds segments to this.
constexpr uint64_t kCudaGranularityBytes = 2 * kMiB;

std::string TestDevice() {
  const char* const given = std::getenv("PINION_TEST_DEVICE");
  return given == nullptr ? "emu" : given;
}

// Ends the test as skipped.
[[noreturn]] void Skip(const std::string& reason) {
  [&reason] { GTEST_SKIP() << reason; }();
  // GoogleTest treats this exception as an already reported end.
  throw ::testing::AssertionException(
      ::testing::TestPartResult(::testing::TestPartResult::kSkip, nullptr, -1, reason.c_str()));
}

// Returns the choice that the environment variable names, or the first if it is unset.
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

EmulatedOptions SlowCopies(double stall_ms) {
  EmulatedOptions options = MachineOptions();
  options.faults.stall_copies_from = 1;
  options.faults.stall_ms = stall_ms;
  return options;
}

OffloadOptions SmallWindows(uint64_t window_bytes) {
  OffloadOptions options;
  options.eviction_window_bytes = window_bytes;
  options.prefetch_window_bytes = window_bytes;
  options.link = AssumedLink();
  options.allocator.segment_bytes = TestDevice() == "emu" ? kMiB : kCudaGranularityBytes;
  options.allocator.warn_percent = 100;
  options.allocator.high_percent = 100;
  options.allocator.low_percent = 100;
  return options;
}

bool TestsRunOnGpu() { return TestDevice().starts_with("cuda"); }

OffloadOptions WithTarget(uint64_t target_bytes) {
  OffloadOptions options = SmallWindows(OffloadOptions::kAutoWindow);
  options.memory_target_bytes = target_bytes;
  return options;
}

HostTierOptions SmallTier() {
  const OffloadOptions options = SmallWindows();
  return {.allocator = options.allocator, .engine = options.engine};
}

std::string Describe(const EmulatedOptions& options) {
  return std::string("schedule ") + NameOf(options.schedule) + ", reuse " +
         (options.reuse == ReuseMode::kImmediate ? "kImmediate" : "kQuarantine") + ", seed " +
         std::to_string(options.seed);
}

bool Soon(const std::function<bool()>& condition) {
  for (int i = 0; i < 60000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

DeviceBackend OwnBackend(std::function<absl::StatusOr<std::shared_ptr<Device>>(int)> device) {
  if (TestsRunOnGpu()) Skip("has a backend of its own on the emulated accelerator");
  // The tier keeps `system` alive, so that no other backend gets its address.
  const auto system = std::make_shared<char>();
  const auto open = [device = std::move(device), system](int index) { return device(index); };
  return {"emu", open, system.get()};
}

namespace {

// Callers of the fake runtime; without any, it is not called. Sessions would be too early: a worker
// of autograd may drop the last reference to one, and its destructors then still call.
class CallersOfFakeCuda {
 public:
  std::shared_ptr<Device> NewDevice(int index) {
    auto device = std::make_shared<CudaDevice>(FakeCuda::Api(), index);
    MutexLock lock(mu_);
    callers_.push_back(device);
    callers_.push_back(device->pinned_source());
    return device;
  }

  bool AreGone() const {
    MutexLock lock(mu_);
    return std::all_of(callers_.begin(), callers_.end(),
                       [](const auto& caller) { return caller.expired(); });
  }

 private:
  mutable Mutex mu_;
  std::vector<std::weak_ptr<void>> callers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

struct EmuWorld::Place {
  c10::DeviceType type = c10::DeviceType::PrivateUse1;
  int first_index = 0;
  int device_count = 0;
  std::shared_ptr<EmulatedMachine> machine;  // none on a GPU
  std::unique_ptr<FakeCuda> fake_cuda;
  DeviceBackend backend;
  const std::shared_ptr<CallersOfFakeCuda> callers = std::make_shared<CallersOfFakeCuda>();
};

namespace {

void Register(const std::shared_ptr<EmulatedMachine>& machine) {
  absl::Status registered;
  PINION_CHECK(Soon([&] {
    registered = RegisterEmuDevice(machine);
    return registered.ok();
  })) << registered;
}

c10::CachingDeviceAllocator::DeviceStats TorchStats(c10::DeviceType type, int index) {
  return c10::getDeviceAllocator(type)->getDeviceStats(static_cast<c10::DeviceIndex>(index));
}

constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

}  // namespace

std::unique_ptr<EmuWorld::Place> EmuWorld::Open(const EmulatedOptions& options) {
  auto place = std::make_unique<Place>();
  const std::string name = TestDevice();
  if (name == "emu" || name == "fake_cuda") {
    place->machine = EmulatedMachine::Create(options).value();
    place->device_count = place->machine->device_count();
    Register(place->machine);
    if (name == "emu") {
      place->backend = EmulatedBackend(place->machine);
    } else {
      place->fake_cuda = std::make_unique<FakeCuda>(place->machine);
      place->backend = OwnBackend([callers = place->callers](int index) {
        return absl::StatusOr<std::shared_ptr<Device>>(callers->NewDevice(index));
      });
    }
    return place;
  }
  if (options.memory_bytes != MachineOptions().memory_bytes) Skip("limits the emulated memory");
  const absl::StatusOr<std::string> chosen = ChooseDevice(name);
  PINION_CHECK(!absl::IsInvalidArgument(chosen.status()))
      << "PINION_TEST_DEVICE: " << chosen.status();
  if (!chosen.ok()) Skip(std::string(chosen.status().message()));
  const c10::Device device(*chosen);
  at::globalContext().lazyInitDevice(device.type());
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  place->type = device.type();
  place->first_index = device.index();
  place->device_count = CudaDeviceCount().value() - device.index();
  place->backend = CudaBackend();
  return place;
}

EmuWorld::EmuWorld(const EmulatedOptions& machine, const OffloadOptions& offload)
    : trace_(__FILE__, __LINE__, Describe(machine)), place_(Open(machine)) {
  at::set_num_threads(1);
  ChooseCpuKernels();
  session_ = NewSession(offload);
}

EmuWorld::~EmuWorld() {
  if (session_ != nullptr) {
    EXPECT_TRUE(Soon([&] { return session_->GetStats().live_handles == 0; }))
        << session_->GetStats().ToString();
  }
  session_.reset();
  EXPECT_TRUE(Soon([&] { return place_->callers->AreGone(); }));
}

EmulatedMachine& EmuWorld::machine() {
  if (place_->machine == nullptr) Skip("is about the emulated accelerator");
  return *place_->machine;
}

std::shared_ptr<OffloadSession> EmuWorld::NewSession(const OffloadOptions& offload) {
  if (TestDevice() != "emu" && offload.allocator.segment_bytes % kCudaGranularityBytes != 0) {
    Skip("pins less at a time than CUDA can");
  }
  return OffloadSession::Create(offload, place_->backend).value();
}

const DeviceBackend& EmuWorld::backend() const { return place_->backend; }

c10::Device EmuWorld::device(int index) const {
  if (index >= place_->device_count) {
    Skip("needs " + std::to_string(index + 1) + " devices from the given one on");
  }
  return c10::Device(place_->type, static_cast<c10::DeviceIndex>(place_->first_index + index));
}

c10::Stream EmuWorld::NewStream(int index) const {
  return c10::impl::VirtualGuardImpl(place_->type).getNewStream(device(index), /*priority=*/0);
}

absl::Status EmuWorld::Synchronize(int index) {
  if (place_->machine != nullptr) return place_->machine->SynchronizeDevice(index);
  c10::impl::VirtualGuardImpl(place_->type).synchronizeDevice(device(index).index());
  return absl::OkStatus();
}

uint64_t EmuWorld::device_bytes(int index) {
  if (place_->machine != nullptr) return place_->machine->memory_stats(index).in_use_bytes;
  return TorchStats(place_->type, device(index).index()).allocated_bytes[kAggregate].current;
}

uint64_t EmuWorld::peak_device_bytes(int index) {
  if (place_->machine != nullptr) return place_->machine->memory_stats(index).peak_bytes;
  return TorchStats(place_->type, device(index).index()).allocated_bytes[kAggregate].peak;
}

void EmuWorld::ResetPeak(int index) {
  if (place_->machine != nullptr) return place_->machine->ResetPeakMemory(index);
  c10::getDeviceAllocator(place_->type)->resetPeakStats(device(index).index());
}

OffloadStats EmuWorld::QuietStats() {
  EXPECT_TRUE(Soon([&] { return session_->GetStats().live_handles == 0; }));
  for (int index = 0; index < place_->device_count; ++index) {
    EXPECT_TRUE(Synchronize(index).ok());
  }
  return session_->GetStats();
}

void EmuWorld::ExpectNothingLeft() {
  const OffloadStats stats = QuietStats();
  EXPECT_EQ(stats.live_handles, 0u) << stats.ToString();
  for (int index = 0; index < place_->device_count; ++index) {
    const EngineStats engine = session_->GetEngineStats(device(index).index());
    EXPECT_EQ(engine.h2d.in_flight_bytes, 0u);
    EXPECT_EQ(engine.d2h.in_flight_bytes, 0u);
  }
  EXPECT_TRUE(Soon([&] { return session_->GetAllocatorStats().booked_bytes.current == 0; }));
}

}  // namespace pinion::testing
