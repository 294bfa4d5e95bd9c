// LibTorch's pinned memory on Pinion's allocator. A process can install it once, so all tests share
// one machine and one allocator; each begins and ends with nothing in use.

#include "pinion/hooks/torch_host_allocator.h"

#include <ATen/Parallel.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/hooks/torch_bridge.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr c10::DeviceType kEmu = c10::DeviceType::PrivateUse1;

// Every block of this size has a segment to itself: it is reused, or its segment stays unused.
constexpr int64_t kWholeSegment = 2 * kMiB;
constexpr uint64_t kLimitBytes = 64 * kMiB;

// Destroyed after what the program registers to happen at its exit.
at::Tensor g_lives_until_exit;

AllocatorOptions Options() {
  AllocatorOptions options;
  options.segment_bytes = kWholeSegment;
  options.max_locked_bytes = kLimitBytes;
  options.warn_percent = 100;  // however much of this host's RAM others use
  options.high_percent = 100;
  options.low_percent = 100;
  return options;
}

// Calls of each device's pinned source.
std::atomic<int> g_pins[2];

class CountingSource final : public HostMemorySource {
 public:
  CountingSource(std::shared_ptr<HostMemorySource> source, std::atomic<int>& pins)
      : source_(std::move(source)), pins_(pins) {}
  std::string name() const override { return source_->name(); }
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
  using ForwardingDevice::ForwardingDevice;
  std::shared_ptr<HostMemorySource> pinned_source() override {
    return std::make_shared<CountingSource>(ForwardingDevice::pinned_source(), g_pins[index()]);
  }
};

// The registered machine's devices.
DeviceBackend Backend() {
  const DeviceBackend emulated = EmulatedBackend(RegisteredEmuMachine());
  return {emulated.type_name, [emulated](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
            PINION_ASSIGN_OR_RETURN(std::shared_ptr<Device> device, emulated.device(index));
            return std::make_shared<CountedDevice>(std::move(device));
          }};
}

class TorchHostAllocatorTest : public ::testing::Test {
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
    EXPECT_THAT(Stats().CheckInvariants(), IsOk());
  }

  static EmulatedMachine& machine() { return **machine_; }
  static at::HostAllocator& allocator() { return *at::getHostAllocator(kEmu); }
  static AllocatorStats Stats() { return TorchHostAllocatorStats("emu").value(); }
  static at::Tensor& pinned_before() { return *pinned_before_; }

  // What tests before this one have seen to that it is never used again.
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

  // Work that takes the stream a second of virtual time.
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

  // LibTorch holds nothing, nothing is waited for, and a block of kWholeSegment is booked still.
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
      EXPECT_THAT(error.what(), HasSubstr("made before fork()"));
    }
  }

  // Whether a new block lies where `data` is.
  static bool Reused(const void* data) { return Pinned(kWholeSegment).data_ptr() == data; }

 private:
  static std::shared_ptr<EmulatedMachine>* machine_;
  static at::Tensor* pinned_before_;
  uint64_t kept_bytes_ = 0;
};

std::shared_ptr<EmulatedMachine>* TorchHostAllocatorTest::machine_ = nullptr;
at::Tensor* TorchHostAllocatorTest::pinned_before_ = nullptr;

TEST_F(TorchHostAllocatorTest, PinMemoryAndEmptyTakeBlocksOfPinion) {
  const at::Tensor source = Random(kMiB);
  const at::Tensor copied = source.pin_memory();
  const at::Tensor empty = Pinned(3 * kMiB);
  EXPECT_TRUE(copied.is_pinned());
  EXPECT_TRUE(empty.is_pinned());
  EXPECT_TRUE(at::equal(copied, source));
  EXPECT_EQ(Stats().requested_bytes.current - kept_bytes(), 4 * kMiB);
}

TEST_F(TorchHostAllocatorTest, AnEmptyTensorTakesNoBlock) {
  EXPECT_EQ(Pinned(0).numel(), 0);
  EXPECT_EQ(allocator().allocate(0).get(), nullptr);
  EXPECT_EQ(Stats().booked_bytes.current, kept_bytes());
  EXPECT_EQ(allocator().get_stats().active_requests.allocated, 0);
}

TEST_F(TorchHostAllocatorTest, APinnedTensorCanGrow) {
  at::Tensor tensor = Pinned(kMiB);
  tensor.copy_(Random(kMiB));
  const at::Tensor copy = tensor.clone();
  tensor.resize_({3 * kMiB});
  EXPECT_TRUE(tensor.is_pinned());
  EXPECT_TRUE(at::equal(tensor.slice(0, 0, kMiB), copy));
}

// at::CachingHostAllocator books 8 MiB for 5, and keeps them.
TEST_F(TorchHostAllocatorTest, ItBooksAnEighthMoreThanIsAskedForAtMost) {
  const at::Tensor tensor = Pinned(5 * kMiB);
  EXPECT_LE(8 * (Stats().booked_bytes.current - kept_bytes()), 9 * 5 * kMiB);
}

TEST_F(TorchHostAllocatorTest, ABlockThatNoCopyUsedIsReusedAtOnce) {
  at::Tensor tensor = Pinned(kWholeSegment);
  const void* const data = tensor.data_ptr();
  Delay(DefaultStream());
  tensor.reset();
  EXPECT_TRUE(Reused(data));
}

TEST_F(TorchHostAllocatorTest, ABlockIsNotReusedBeforeTheCopyOutOfItIsDone) {
  at::Tensor tensor = Pinned(kWholeSegment);
  const void* const data = tensor.data_ptr();
  at::Tensor device = OnDevice(kWholeSegment);
  Delay(DefaultStream());
  device.copy_(tensor, /*non_blocking=*/true);
  tensor.reset();
  EXPECT_GT(Stats().deferred_bytes.current, 0u);
  EXPECT_FALSE(Reused(data));
  ASSERT_THAT(machine().SynchronizeDevice(0), IsOk());
  const at::Tensor elsewhere = Pinned(kWholeSegment);
  EXPECT_TRUE(Reused(data));
}

TEST_F(TorchHostAllocatorTest, ABlockWaitsForEveryStreamThatUsedIt) {
  at::Tensor tensor = Pinned(kWholeSegment);
  const void* const data = tensor.data_ptr();
  at::Tensor first = OnDevice(kMiB, 0);
  at::Tensor second = OnDevice(kMiB, 1);
  first.copy_(tensor.slice(0, 0, kMiB), /*non_blocking=*/true);
  Delay(DefaultStream(1));
  second.copy_(tensor.slice(0, kMiB, 2 * kMiB), /*non_blocking=*/true);
  tensor.reset();
  ASSERT_THAT(machine().SynchronizeDevice(0), IsOk());
  const at::Tensor elsewhere = Pinned(kWholeSegment);
  EXPECT_NE(elsewhere.data_ptr(), data);
  ASSERT_THAT(machine().SynchronizeDevice(1), IsOk());
  EXPECT_TRUE(Reused(data));
}

// Work that a stream gets after the copy, but before the free, may use the block as well.
TEST_F(TorchHostAllocatorTest, ABlockWaitsForWhatItsStreamHasWhenItIsFreed) {
  at::Tensor tensor = Pinned(kWholeSegment);
  const void* const data = tensor.data_ptr();
  at::Tensor device = OnDevice(kWholeSegment);
  device.copy_(tensor, /*non_blocking=*/true);
  ASSERT_THAT(machine().SynchronizeDevice(0), IsOk());
  Delay(DefaultStream());
  tensor.reset();
  EXPECT_FALSE(Reused(data));
}

TEST_F(TorchHostAllocatorTest, AForeignViewOfAPartOfABlockHoldsTheBlock) {
  at::Tensor tensor = Pinned(kWholeSegment);
  char* const data = static_cast<char*>(tensor.data_ptr());
  at::Tensor device = OnDevice(kMiB);
  Delay(DefaultStream());
  {
    const at::Tensor view = at::from_blob(data + 4096, {kMiB}, at::kByte);
    EXPECT_TRUE(view.is_pinned());
    device.copy_(view, /*non_blocking=*/true);
  }
  tensor.reset();
  EXPECT_FALSE(Reused(data));
}

TEST_F(TorchHostAllocatorTest, RecordEventKnowsABlockByAnyAddressWithin) {
  const at::Tensor tensor = Pinned(1000);
  char* const data = static_cast<char*>(tensor.data_ptr());
  void* const context = tensor.storage().data_ptr().get_context();
  EXPECT_TRUE(allocator().record_event(data, context, DefaultStream()));
  EXPECT_TRUE(allocator().record_event(data, nullptr, DefaultStream()));
  EXPECT_TRUE(allocator().record_event(data + 999, nullptr, DefaultStream()));
  EXPECT_FALSE(allocator().record_event(data + 1000, nullptr, DefaultStream()));
  EXPECT_FALSE(allocator().record_event(data - 1, nullptr, DefaultStream()));
  int foreign = 0;
  EXPECT_FALSE(allocator().record_event(&foreign, &foreign, DefaultStream()));
  EXPECT_FALSE(allocator().record_event(nullptr, nullptr, DefaultStream()));
}

TEST_F(TorchHostAllocatorTest, WhatWasPinnedBeforeStaysWithTheAllocatorThatPinnedIt) {
  at::Tensor& before = pinned_before();
  ASSERT_TRUE(before.defined());
  EXPECT_TRUE(allocator().record_event(before.data_ptr(), before.storage().data_ptr().get_context(),
                                       DefaultStream()));
  before.reset();
  EXPECT_EQ(allocator().get_stats().active_requests.freed, 0);
}

TEST_F(TorchHostAllocatorTest, CopiesThereAndBackAreIdenticalThoughTheirHostMemoryDiesEarly) {
  const at::Tensor source = Random(kMiB);
  at::Tensor device = OnDevice(kMiB);
  Delay(DefaultStream());
  device.copy_(source.pin_memory(), /*non_blocking=*/true);
  // Takes whatever is free now.
  at::full({kMiB}, 0xEE, at::kByte).pin_memory();
  const at::Tensor back = Pinned(kMiB);
  back.copy_(device, /*non_blocking=*/true);
  ASSERT_THAT(machine().SynchronizeDevice(0), IsOk());
  EXPECT_TRUE(at::equal(back, source));
}

TEST_F(TorchHostAllocatorTest, WhatACaptureCopiesIsNeverReused) {
  const c10::Stream stream = NewStream();
  at::Tensor tensor = Pinned(kWholeSegment);
  void* const data = tensor.data_ptr();
  ASSERT_THAT(machine().SetCapturing(NativeStream(stream), true), IsOk());
  EXPECT_TRUE(allocator().record_event(data, nullptr, stream));
  ASSERT_THAT(machine().SetCapturing(NativeStream(stream), false), IsOk());
  tensor.reset();
  Settle();
  EXPECT_TRUE(ABlockIsKeptForEver());
}

TEST_F(TorchHostAllocatorTest, ABlockThatIsFreedWhileItsStreamCapturesIsNeverReused) {
  const c10::Stream stream = NewStream();
  at::Tensor tensor = Pinned(kWholeSegment);
  void* const data = tensor.data_ptr();
  EXPECT_TRUE(allocator().record_event(data, nullptr, stream));
  ASSERT_THAT(machine().SetCapturing(NativeStream(stream), true), IsOk());
  tensor.reset();
  ASSERT_THAT(machine().SetCapturing(NativeStream(stream), false), IsOk());
  Settle();
  EXPECT_TRUE(ABlockIsKeptForEver());
}

// CUDAGraph calls these; at::HostAllocator's own throw, which would break every capture.
TEST_F(TorchHostAllocatorTest, WhatIsAllocatedInACaptureIsNeverReused) {
  const c10::MempoolId_t pool = {1, 0};
  const c10::Stream stream = NewStream();
  const c10::StreamGuard guard(stream);
  allocator().begin_allocate_to_pool(pool, [](c10::Stream) { return true; });
  at::Tensor before_capture = Pinned(kWholeSegment);
  const void* const data_before = before_capture.data_ptr();
  ASSERT_THAT(machine().SetCapturing(NativeStream(stream), true), IsOk());
  at::Tensor in_capture = Pinned(kWholeSegment);
  const void* const data_in = in_capture.data_ptr();
  ASSERT_THAT(machine().SetCapturing(NativeStream(stream), false), IsOk());
  allocator().end_allocate_to_pool(pool);
  in_capture.reset();
  EXPECT_FALSE(Reused(data_in));
  before_capture.reset();
  EXPECT_TRUE(Reused(data_before));
  allocator().release_pool(pool);
}

TEST_F(TorchHostAllocatorTest, BeyondTheLimitPinMemoryIsOutOfMemory) {
  try {
    Pinned(2 * kLimitBytes);
    FAIL() << "there was memory";
  } catch (const c10::OutOfMemoryError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("pinned memory"), HasSubstr("max_locked_bytes")));
  }
  EXPECT_TRUE(Pinned(kWholeSegment).is_pinned());
}

// Pinning opens a context on the device: a rank of cuda:1 has no business on cuda:0.
TEST_F(TorchHostAllocatorTest, ASegmentIsPinnedThroughTheCurrentDevice) {
  const int pins_0 = g_pins[0];
  const int pins_1 = g_pins[1];
  const c10::DeviceGuard guard(c10::Device(kEmu, 1));
  const at::Tensor tensor = Pinned(kWholeSegment);
  EXPECT_EQ(g_pins[0], pins_0);
  EXPECT_EQ(g_pins[1], pins_1 + 1);
}

TEST_F(TorchHostAllocatorTest, EmptyCacheGivesTheSegmentsBack) {
  Pinned(kWholeSegment);
  EXPECT_GE(Stats().cached_bytes.current, uint64_t{kWholeSegment});
  allocator().empty_cache();
  EXPECT_EQ(Stats().cached_bytes.current, 0u);
  EXPECT_EQ(allocator().get_stats().num_host_free, 1);
}

TEST_F(TorchHostAllocatorTest, StatisticsCountWhatLibTorchHoldsAndTheSegmentsBehindIt) {
  const int64_t segments = allocator().get_stats().allocations.current;
  at::Tensor first = Pinned(kWholeSegment);
  at::Tensor second = Pinned(kWholeSegment);
  first.reset();
  at::HostStats stats = allocator().get_stats();
  EXPECT_EQ(stats.active_requests.current, 1);
  EXPECT_EQ(stats.active_requests.peak, 2);
  EXPECT_EQ(stats.active_requests.allocated, 2);
  EXPECT_EQ(stats.active_requests.freed, 1);
  const int64_t block_bytes = Stats().booked_bytes.current - kept_bytes();
  EXPECT_EQ(stats.active_bytes.current, block_bytes);
  EXPECT_EQ(stats.active_bytes.peak, 2 * block_bytes);
  EXPECT_EQ(stats.allocations.current, segments + 2);
  EXPECT_EQ(stats.num_host_alloc, 2);
  EXPECT_EQ(stats.num_host_free, 0);
  EXPECT_EQ(stats.host_alloc_time.count, 2);
  EXPECT_THAT(stats.bucket_allocation, Contains(2));
  EXPECT_EQ(static_cast<uint64_t>(stats.allocated_bytes.current), Stats().locked_bytes.current);

  allocator().reset_accumulated_stats();
  allocator().reset_peak_stats();
  stats = allocator().get_stats();
  EXPECT_EQ(stats.active_requests.current, 1);
  EXPECT_EQ(stats.active_requests.peak, 1);
  EXPECT_EQ(stats.active_requests.allocated, 0);
  EXPECT_EQ(stats.active_bytes.peak, block_bytes);
  EXPECT_EQ(stats.allocations.allocated, 0);
  EXPECT_EQ(stats.num_host_alloc, 0);
  EXPECT_EQ(stats.host_alloc_time.count, 0);
  EXPECT_THAT(stats.bucket_allocation, Each(0));

  second.reset();
  allocator().empty_cache();
  allocator().reset_peak_stats();
  stats = allocator().get_stats();
  EXPECT_EQ(stats.active_bytes.peak, 0);
  EXPECT_EQ(stats.allocated_bytes.peak, stats.allocated_bytes.current);
  EXPECT_EQ(stats.num_host_free, 2);
}

// One name, one number: blocks that copies still use are not LibTorch's any more, blocks that are
// never used again neither.
TEST_F(TorchHostAllocatorTest, StatisticsByNameAreThoseOfLibTorch) {
  at::Tensor kept = Pinned(kWholeSegment);
  at::Tensor captured = Pinned(kWholeSegment);
  at::Tensor copied = Pinned(kWholeSegment);
  const c10::Stream stream = NewStream();
  ASSERT_THAT(machine().SetCapturing(NativeStream(stream), true), IsOk());
  allocator().record_event(captured.data_ptr(), nullptr, stream);
  ASSERT_THAT(machine().SetCapturing(NativeStream(stream), false), IsOk());
  captured.reset();
  at::Tensor device = OnDevice(kWholeSegment);
  Delay(DefaultStream());
  device.copy_(copied, /*non_blocking=*/true);
  copied.reset();
  ASSERT_GT(Stats().deferred_bytes.current, 0u);
  EXPECT_THROW(Pinned(2 * kLimitBytes), c10::OutOfMemoryError);

  const at::HostStats stats = allocator().get_stats();
  const std::map<std::string, int64_t> named = TorchHostMemoryStats("emu").value();
  EXPECT_EQ(named.at("active_bytes.current"), kWholeSegment);
  EXPECT_EQ(named.at("active_bytes.current"), stats.active_bytes.current);
  EXPECT_EQ(named.at("active_bytes.peak"), stats.active_bytes.peak);
  EXPECT_EQ(named.at("active_requests.allocated"), 3);
  EXPECT_EQ(named.at("active_requests.freed"), 2);
  EXPECT_EQ(named.at("allocations.current"), stats.allocations.current);
  EXPECT_EQ(named.at("allocated_bytes.current"), stats.allocated_bytes.current);
  EXPECT_EQ(named.at("num_host_alloc"), 3);
  EXPECT_EQ(named.at("num_host_free"), stats.num_host_free);
  EXPECT_EQ(named.at("host_alloc_time.count"), 3);
  EXPECT_EQ(named.at("host_alloc_time.total"), stats.host_alloc_time.total);
  EXPECT_EQ(named.at("host_free_time.count"), stats.host_free_time.count);
}

TEST_F(TorchHostAllocatorTest, PinionDisableLeavesLibTorchItsOwn) {
  ASSERT_EQ(setenv("PINION_DISABLE", "1", 1), 0);
  const at::HostAllocator* const before = at::getHostAllocator(c10::kXPU);
  EXPECT_THAT(InstallTorchHostAllocator(Options(), {"xpu", Backend().device}), IsOk());
  EXPECT_EQ(at::getHostAllocator(c10::kXPU), before);
  EXPECT_THAT(TorchHostMemoryStats("xpu").status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("PINION_DISABLE")));
  ASSERT_EQ(unsetenv("PINION_DISABLE"), 0);
}

TEST_F(TorchHostAllocatorTest, ItIsInstalledOnceForATypeThatLibTorchKnows) {
  const DeviceBackend backend = Backend();
  EXPECT_THAT(InstallTorchHostAllocator(Options(), backend),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("emu")));
  EXPECT_THAT(InstallTorchHostAllocator(Options(), {"warp_drive", backend.device}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("warp_drive")));
  AllocatorOptions bad = Options();
  bad.max_locked_bytes = 0;
  EXPECT_THAT(InstallTorchHostAllocator(bad, backend),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_locked_bytes")));
  EXPECT_THAT(TorchHostAllocatorStats("cuda"), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(TorchHostAllocatorStats("warp_drive"), StatusIs(absl::StatusCode::kInvalidArgument));
}

// As a DataLoader with pin_memory=True: workers pin batches that the training loop copies to the
// device, and drops at once.
TEST_F(TorchHostAllocatorTest, ThreadsMayPinCopyAndDropAtOnce) {
  std::vector<at::Tensor> batches;
  for (int i = 0; i < 4; ++i) batches.push_back(Random(64 * 1024 + i));
  std::atomic<int> wrong = 0;
  RunThreads(4, [&](int thread) {
    const at::Tensor& batch = batches[thread];
    const c10::StreamGuard guard(NewStream(thread % 2));
    at::Tensor device = OnDevice(batch.numel(), thread % 2);
    for (int step = 0; step < 50; ++step) {
      device.zero_();
      device.copy_(batch.pin_memory(), /*non_blocking=*/true);
      const at::Tensor back = Pinned(batch.numel());
      back.copy_(device, /*non_blocking=*/false);
      if (!at::equal(back, batch)) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST_F(TorchHostAllocatorTest, ABlockMayBeFreedWhileAnotherThreadRecordsAnEventForIt) {
  const c10::Stream stream = DefaultStream();
  Delay(stream);
  std::atomic<void*> shared = nullptr;
  std::atomic<bool> done = false;
  std::atomic<int> recorded = 0;
  int blocks = 0;
  RunThreads(2, [&](int thread) {
    if (thread == 0) {
      while (blocks < 2000 || (recorded < 100 && blocks < 1000000)) {
        const c10::DataPtr block = allocator().allocate(4096);
        shared = block.get();
        ++blocks;
      }
      done = true;
    } else {
      while (!done) recorded += allocator().record_event(shared, nullptr, stream);
    }
  });
  EXPECT_GE(recorded, 100);
  EXPECT_GT(Stats().deferred_bytes.current, 0u);  // the stream is behind
  EXPECT_EQ(allocator().get_stats().active_requests.allocated, blocks);
}

TEST_F(TorchHostAllocatorTest, AChildOfForkCannotPinAndMayDropWhatItInherits) {
  at::Tensor inherited = Pinned(kMiB);
  at::Tensor device = OnDevice(kMiB);
  device.copy_(inherited, /*non_blocking=*/true);
  ChildProcess child([&] {
    ExpectForkError([] { Pinned(kMiB); });
    inherited.reset();
  });
  EXPECT_EQ(child.Wait(), 0);
}

// A lock that another thread of the parent holds at the fork stays taken in the child.
TEST_F(TorchHostAllocatorTest, AChildOfForkHangsInNothingThatTheParentsThreadsWereDoing) {
  const at::Tensor shared = Pinned(kMiB);
  void* const data = shared.data_ptr();
  const c10::Stream stream = DefaultStream();
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!done) {
        const c10::DataPtr block = allocator().allocate(4096);
        allocator().record_event(data, nullptr, stream);
        allocator().get_stats();
        allocator().reset_peak_stats();
      }
    });
  }
  for (int i = 0; i < 30; ++i) {
    ChildProcess child([&] {
      alarm(60);  // ends a child that hangs
      EXPECT_FALSE(allocator().record_event(data, nullptr, stream));
      ExpectForkError([] { allocator().get_stats(); });
      ExpectForkError([] { allocator().reset_accumulated_stats(); });
      ExpectForkError([] { allocator().reset_peak_stats(); });
      ExpectForkError([] { allocator().empty_cache(); });
      EXPECT_THAT(TorchHostMemoryStats("emu").status(),
                  StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("fork")));
    });
    EXPECT_EQ(child.Wait(), 0);
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
}

TEST_F(TorchHostAllocatorTest, PinnedTensorsMayOutliveTheProgramsLastLine) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto exit_with_copies_in_flight = [] {
    static at::Tensor goes_before_the_handlers;
    g_lives_until_exit = Pinned(kMiB);
    goes_before_the_handlers = Pinned(kMiB);
    static at::Tensor device = OnDevice(2 * kMiB);
    Delay(DefaultStream());
    device.slice(0, 0, kMiB).copy_(g_lives_until_exit, /*non_blocking=*/true);
    device.slice(0, kMiB, 2 * kMiB).copy_(goes_before_the_handlers, /*non_blocking=*/true);
    std::exit(0);
  };
  EXPECT_EXIT(exit_with_copies_in_flight(), ::testing::ExitedWithCode(0), "^$");
}

}  // namespace
}  // namespace pinion::testing
