// Installs Pinion's allocator as LibTorch's pinned memory, on an emulated machine with two devices.
// A process can install it only once, so all tests of a program share machine and allocator. Each
// test begins and ends with nothing in use.

#ifndef PINION_TESTS_HOOKS_PIN_MEMORY_TORCH_HOST_ALLOCATOR_FIXTURE_H_
#define PINION_TESTS_HOOKS_PIN_MEMORY_TORCH_HOST_ALLOCATOR_FIXTURE_H_

#include <ATen/Parallel.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/hooks/pin_memory/torch_host_allocator.h"
#include "pinion/tests/support/allocator_invariants.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {

inline constexpr c10::DeviceType kEmu = c10::DeviceType::PrivateUse1;

// Each block of this size has a segment of its own, so reuse of a block shows as the same address.
inline constexpr int64_t kWholeSegment = 2 * kMiB;
inline constexpr uint64_t kLimitBytes = 64 * kMiB;

inline AllocatorOptions Options() {
  AllocatorOptions options;
  options.segment_bytes = kWholeSegment;
  options.max_locked_bytes = kLimitBytes;
  options.warn_percent = 100;  // independent of other programs' RAM
  options.high_percent = 100;
  options.low_percent = 100;
  return options;
}

// Calls of each device's pinned source.
inline std::atomic<int> g_pins[2];
// The number of device openings, and of queries whether a stream captures.
inline std::atomic<int> g_opened = 0;
inline std::atomic<int> g_asked_of_captures = 0;

class CountingSource final : public HostMemorySource {
 public:
  CountingSource(std::shared_ptr<HostMemorySource> source, std::atomic<int>& pins)
      : source_(std::move(source)), pins_(pins) {}
  std::string name() const override { return source_->name(); }
  bool pinned() const override { return source_->pinned(); }
  uint64_t granularity_bytes() const override { return source_->granularity_bytes(); }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    ++pins_;
    return source_->Allocate(size_bytes);
  }
  absl::Status Free(const HostSegment& segment) override { return source_->Free(segment); }

 private:
  const std::shared_ptr<HostMemorySource> source_;
  std::atomic<int>& pins_;
};

class CountedDevice final : public ForwardingDevice {
 public:
  CountedDevice(std::shared_ptr<Device> device, int index)
      : ForwardingDevice(std::move(device)), index_(index) {}
  std::shared_ptr<HostMemorySource> pinned_source() override {
    return std::make_shared<CountingSource>(ForwardingDevice::pinned_source(), g_pins[index_]);
  }
  absl::StatusOr<bool> IsCapturing(StreamHandle stream) override {
    ++g_asked_of_captures;
    return ForwardingDevice::IsCapturing(stream);
  }

 private:
  const int index_;
};

// The registered machine's devices, with calls counted.
inline DeviceBackend Backend() {
  const DeviceBackend emulated = EmulatedBackend(RegisteredEmuMachine());
  return {emulated.type_name, [emulated](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
            ++g_opened;
            PINION_ASSIGN_OR_RETURN(std::shared_ptr<Device> device, emulated.device(index));
            return std::make_shared<CountedDevice>(std::move(device), index);
          }};
}

class TorchHostAllocatorFixture : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    at::set_num_threads(1);
    EmulatedOptions options;
    options.device_count = 2;
    options.memory_bytes = 64 * kMiB;
    machine_ = new std::shared_ptr(EmulatedMachine::Create(options).value());
    ASSERT_THAT(RegisterEmuDevice(*machine_), IsOk());
    pinned_before_ = new at::Tensor(Pinned(kMiB));
    ASSERT_THAT(InstallTorchHostAllocator(Options(), Backend()), IsOk());
  }

  void SetUp() override {
    Settle();
    allocator().reset_accumulated_stats();
    allocator().reset_peak_stats();
    kept_bytes_ = Stats().booked_bytes.current;
  }
  void TearDown() override {
    Settle();
    EXPECT_EQ(allocator().get_stats().active_requests.current, 0);
    EXPECT_EQ(Stats().deferred_bytes.current, 0u);
    EXPECT_THAT(CheckInvariants(Stats()), IsOk());
  }

  static EmulatedMachine& machine() { return **machine_; }
  static at::HostAllocator& allocator() { return *at::getHostAllocator(kEmu); }
  static AllocatorStats Stats() { return TorchHostAllocatorStats("emu").value(); }
  static at::Tensor& pinned_before() { return *pinned_before_; }

  // Bytes of blocks that earlier tests made permanently unusable.
  uint64_t kept_bytes() const { return kept_bytes_; }

  static void Settle() {
    for (int i = 0; i < machine().device_count(); ++i) {
      ASSERT_THAT(machine().SynchronizeDevice(i), IsOk());
    }
    allocator().empty_cache();
  }

  static at::Tensor Pinned(int64_t size_bytes) {
    return at::empty({size_bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  }
  static at::Tensor OnDevice(int64_t size_bytes, int index = 0) {
    return at::empty({size_bytes}, at::TensorOptions(at::kByte).device(c10::Device(kEmu, index)));
  }
  static at::Tensor Random(int64_t size_bytes) { return at::randint(256, {size_bytes}, at::kByte); }

  // Occupies the stream for a second of virtual time.
  static void Delay(const c10::Stream& stream) {
    const int device = stream.device_index();
    ASSERT_THAT(machine().PrepareKernel(device, NativeStream(stream)), IsOk());
    Kernel kernel;
    kernel.name = "delay";
    kernel.flops = 1e14;
    ASSERT_THAT(machine().Launch(device, NativeStream(stream), kernel), IsOk());
  }
  static c10::Stream DefaultStream(int index = 0) {
    return CurrentStream(c10::Device(kEmu, index));
  }
  static c10::Stream NewStream(int index = 0) {
    return c10::impl::VirtualGuardImpl(kEmu).getNewStream(c10::Device(kEmu, index), 0);
  }

  // Returns whether one block of kWholeSegment is booked but used by neither LibTorch nor copies.
  bool ABlockIsKeptForEver() const {
    const AllocatorStats stats = Stats();
    return allocator().get_stats().active_requests.current == 0 &&
           stats.deferred_bytes.current == 0 &&
           stats.booked_bytes.current == kept_bytes_ + kWholeSegment;
  }

  static void ExpectForkError(const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "a child of fork() has used the parent's allocator";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("made before fork()"));
    }
  }

  // Returns whether a new block gets the address `data`.
  static bool Reused(const void* data) { return Pinned(kWholeSegment).data_ptr() == data; }

 private:
  static inline std::shared_ptr<EmulatedMachine>* machine_ = nullptr;
  static inline at::Tensor* pinned_before_ = nullptr;
  uint64_t kept_bytes_ = 0;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_PIN_MEMORY_TORCH_HOST_ALLOCATOR_FIXTURE_H_
