// Checks LibTorch's pinned tensors on Pinion: their blocks, reuse after copies, and statistics.

#include "pinion/hooks/pin_memory/torch_host_allocator.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/tests/hooks/pin_memory/torch_host_allocator_fixture.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;

using TorchHostAllocatorTest = TorchHostAllocatorFixture;

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

// at::CachingHostAllocator books and keeps 8 MiB for 5 MiB.
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

TEST_F(TorchHostAllocatorTest, ABlockWhoseCopyTheHostHasWaitedForWaitsForNothingElse) {
  at::Tensor tensor = Pinned(kWholeSegment);
  const void* const data = tensor.data_ptr();
  at::Tensor device = OnDevice(kWholeSegment);
  device.copy_(tensor, /*non_blocking=*/false);
  Delay(DefaultStream());
  tensor.reset();
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

TEST_F(TorchHostAllocatorTest, ABlockWaitsForEveryStreamOfOneDevice) {
  at::Tensor tensor = Pinned(kWholeSegment);
  const void* const data = tensor.data_ptr();
  at::Tensor first = OnDevice(kMiB);
  first.copy_(tensor.slice(0, 0, kMiB), /*non_blocking=*/true);
  const c10::Stream side = NewStream();
  Delay(side);
  {
    const c10::StreamGuard guard(side);
    at::Tensor second = OnDevice(kMiB);
    second.copy_(tensor.slice(0, kMiB, 2 * kMiB), /*non_blocking=*/true);
  }
  tensor.reset();
  DefaultStream().synchronize();
  const at::Tensor elsewhere = Pinned(kWholeSegment);
  EXPECT_NE(elsewhere.data_ptr(), data);
  ASSERT_THAT(machine().SynchronizeDevice(0), IsOk());
  EXPECT_TRUE(Reused(data));
}

// Work queued on the stream after the copy, but before the free, may use the block too.
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
  // Takes the free blocks.
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

// CUDAGraph calls these; at::HostAllocator's own versions throw, which would break captures.
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

TEST_F(TorchHostAllocatorTest, ACloneHasTheBytesInABlockOfItsOwn) {
  const at::Tensor source = Pinned(kMiB);
  source.copy_(Random(kMiB));
  const c10::DataPtr clone = allocator().clone(source.data_ptr(), kMiB);
  EXPECT_NE(clone.get(), source.data_ptr());
  EXPECT_TRUE(at::equal(at::from_blob(clone.get(), {kMiB}, at::kByte), source));
}

TEST_F(TorchHostAllocatorTest, OnceACaptureHasEndedAllocationsAskTheDeviceNothing) {
  const c10::MempoolId_t pool = {1, 0};
  allocator().begin_allocate_to_pool(pool, [](c10::Stream) { return true; });
  const int before = g_asked_of_captures;
  Pinned(kWholeSegment);
  const int during = g_asked_of_captures;
  EXPECT_GT(during, before);
  allocator().end_allocate_to_pool(pool);
  Pinned(kWholeSegment);
  EXPECT_EQ(g_asked_of_captures, during);
}

TEST_F(TorchHostAllocatorTest, ADeviceWhoseStreamsUseBlocksIsOpenedOnce) {
  const at::Tensor tensor = Pinned(kWholeSegment);
  EXPECT_TRUE(allocator().record_event(tensor.data_ptr(), nullptr, DefaultStream()));
  const int before = g_opened;
  EXPECT_TRUE(allocator().record_event(tensor.data_ptr(), nullptr, DefaultStream()));
  EXPECT_EQ(g_opened, before);
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

// Pinning opens a context on the device, and a rank of cuda:1 should not open one on cuda:0.
TEST_F(TorchHostAllocatorTest, ASegmentIsPinnedThroughTheCurrentDevice) {
  const int pins_0 = g_pins[0];
  const int pins_1 = g_pins[1];
  const c10::DeviceGuard guard(c10::Device(kEmu, 1));
  const at::Tensor tensor = Pinned(kWholeSegment);
  EXPECT_EQ(g_pins[0], pins_0);
  EXPECT_EQ(g_pins[1], pins_1 + 1);
}

// PyTorch's host cache could not give pinned memory back (pytorch#134051).
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
  EXPECT_EQ(stats.host_alloc_time.max, 0);
  EXPECT_EQ(stats.host_free_time.max, 0);
  EXPECT_EQ(stats.allocated_bytes.peak, stats.allocated_bytes.current);
  EXPECT_EQ(stats.num_host_free, 2);
}

// The names are those of torch.cuda.host_memory_stats().
std::map<std::string, int64_t> ByName(const at::HostStats& stats) {
  std::map<std::string, int64_t> named = {{"num_host_alloc", stats.num_host_alloc},
                                          {"num_host_free", stats.num_host_free}};
  const std::pair<std::string, c10::CachingAllocator::Stat> counts[] = {
      {"active_requests", stats.active_requests},
      {"active_bytes", stats.active_bytes},
      {"allocations", stats.allocations},
      {"allocated_bytes", stats.allocated_bytes}};
  for (const auto& [name, stat] : counts) {
    named[name + ".current"] = stat.current;
    named[name + ".peak"] = stat.peak;
    named[name + ".allocated"] = stat.allocated;
    named[name + ".freed"] = stat.freed;
  }
  const std::pair<std::string, c10::CachingAllocator::DurationStat> times[] = {
      {"host_alloc_time", stats.host_alloc_time}, {"host_free_time", stats.host_free_time}};
  for (const auto& [name, stat] : times) {
    named[name + ".total"] = stat.total;
    named[name + ".max"] = stat.max;
    named[name + ".min"] = stat.min;
    named[name + ".count"] = stat.count;
    named[name + ".avg"] = stat.total / std::max<int64_t>(stat.count, 1);
  }
  return named;
}

// Blocks that pending copies use, or that are never reused, do not count as LibTorch's.
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
  EXPECT_EQ(named.at("active_requests.allocated"), 3);
  EXPECT_EQ(named.at("active_requests.freed"), 2);
  EXPECT_EQ(named.at("num_host_alloc"), 3);
  EXPECT_EQ(named.at("host_alloc_time.count"), 3);
  EXPECT_EQ(named, ByName(stats));
}

TEST_F(TorchHostAllocatorTest, AnAverageOfNoTimesIsNoneAndOfOneThatTime) {
  std::map<std::string, int64_t> named = TorchHostMemoryStats("emu").value();
  EXPECT_EQ(named.at("host_alloc_time.avg"), 0);
  const at::Tensor pinned = Pinned(kWholeSegment);
  named = TorchHostMemoryStats("emu").value();
  EXPECT_EQ(named.at("host_alloc_time.count"), 1);
  EXPECT_EQ(named.at("host_alloc_time.avg"), named.at("host_alloc_time.total"));
}

TEST_F(TorchHostAllocatorTest, PinionDisableLeavesLibTorchItsOwn) {
  ASSERT_EQ(setenv("PINION_DISABLE", "1", 1), 0);
  const at::HostAllocator* const before = at::getHostAllocator(c10::kXPU);
  EXPECT_THAT(InstallTorchHostAllocator(Options(), {"xpu", Backend().device}), IsOk());
  EXPECT_EQ(at::getHostAllocator(c10::kXPU), before);
  EXPECT_THAT(TorchHostMemoryStats("xpu").status(),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("PINION_DISABLE=1 is in the environment; unset it")));
  ASSERT_EQ(unsetenv("PINION_DISABLE"), 0);
}

TEST_F(TorchHostAllocatorTest, ItIsInstalledOnceWhateverTheOptions) {
  AllocatorOptions others = Options();
  others.max_locked_bytes = 2 * kWholeSegment;
  EXPECT_THAT(
      InstallTorchHostAllocator(others, Backend()),
      StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("for emu already: install it once")));
}

TEST_F(TorchHostAllocatorTest, ItIsInstalledOnceForATypeThatLibTorchKnows) {
  const DeviceBackend backend = Backend();
  EXPECT_THAT(
      InstallTorchHostAllocator(Options(), backend),
      StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("for emu already: install it once")));
  EXPECT_THAT(InstallTorchHostAllocator(Options(), {"warp_drive", backend.device}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("warp_drive")));
  AllocatorOptions bad = Options();
  bad.max_locked_bytes = 0;
  EXPECT_THAT(InstallTorchHostAllocator(bad, backend),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_locked_bytes")));
  EXPECT_THAT(TorchHostAllocatorStats("cuda"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("call InstallTorchHostAllocator")));
  EXPECT_THAT(TorchHostAllocatorStats("warp_drive"), StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace pinion::testing
