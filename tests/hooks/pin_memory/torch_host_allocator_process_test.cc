// Checks LibTorch's pinned memory on Pinion with threads, children of fork(), and process exit.

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/pin_memory/torch_host_allocator.h"
#include "pinion/tests/hooks/pin_memory/torch_host_allocator_fixture.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::HasSubstr;

using TorchHostAllocatorProcessTest = TorchHostAllocatorFixture;

// Destroyed after the program's atexit handlers.
at::Tensor g_lives_until_exit;

// Like a DataLoader with pin_memory=True: workers pin batches, and the training loop copies them to
// the device and drops them immediately.
TEST_F(TorchHostAllocatorProcessTest, ThreadsMayPinCopyAndDropAtOnce) {
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

TEST_F(TorchHostAllocatorProcessTest, ABlockMayBeFreedWhileAnotherThreadRecordsAnEventForIt) {
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
        // On a shared processor, the other thread must run while a block lives.
        if (++blocks > 2000) std::this_thread::yield();
      }
      done = true;
    } else {
      while (!done) recorded += allocator().record_event(shared, nullptr, stream);
    }
  });
  EXPECT_GE(recorded, 100);
  EXPECT_GT(Stats().deferred_bytes.current, 0u);  // the stream is delayed
  EXPECT_EQ(allocator().get_stats().active_requests.allocated, blocks);
}

// No other test in this program makes a block unusable.
TEST_F(TorchHostAllocatorProcessTest, TheFirstBlockThatIsNeverUsedAgainIsLoggedAndNoOther) {
  const CapturedLog log;
  const c10::Stream stream = NewStream();
  for (int i = 0; i < 3; ++i) {
    at::Tensor tensor = Pinned(kMiB);
    ASSERT_THAT(machine().SetCapturing(NativeStream(stream), true), IsOk());
    allocator().record_event(tensor.data_ptr(), nullptr, stream);
    ASSERT_THAT(machine().SetCapturing(NativeStream(stream), false), IsOk());
    tensor.reset();
  }
  const size_t first = log.text().find("is never used again");
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(log.text().find("is never used again", first + 1), std::string::npos) << log.text();
}

TEST_F(TorchHostAllocatorProcessTest, AChildOfForkCannotPinAndMayDropWhatItInherits) {
  at::Tensor inherited = Pinned(kMiB);
  at::Tensor device = OnDevice(kMiB);
  device.copy_(inherited, /*non_blocking=*/true);
  ChildProcess child([&] {
    ExpectForkError([] { Pinned(kMiB); });
    inherited.reset();
  });
  EXPECT_EQ(child.Wait(), 0);
}

// A lock that another thread of the parent holds at the fork stays locked in the child.
TEST_F(TorchHostAllocatorProcessTest, AChildOfForkHangsInNothingThatTheParentsThreadsWereDoing) {
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
    at::Tensor inherited = Pinned(4096);
    ChildProcess child([&] {
      inherited.reset();
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

TEST_F(TorchHostAllocatorProcessTest, PinnedTensorsMayOutliveTheProgramsLastLine) {
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
