// Concurrent use of one engine. ThreadSanitizer finds most of the errors.

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/fence.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/faulty_world.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace engine_threads_test {

using ::testing::IsEmpty;

constexpr absl::Duration kLong = absl::Seconds(60);
constexpr uint64_t kSize = 4 * kKiB;
constexpr int kThreads = 4;
constexpr int kRounds = 50;

TEST(EngineThreadsTest, ThreadsThatSubmitAndPollMoveTheRightBytes) {
  EngineWorld world(TestMachineOptions(), Chunks(kSize / 4));
  std::atomic<bool> stop{false};
  std::thread poller([&] {
    while (!stop.load()) {
      world.engine().Poll();
      EXPECT_THAT(world.engine().health(), IsOk());
      const DirectionStats stats = world.engine().GetStats().d2h;
      EXPECT_EQ(stats.submitted_bytes, stats.completed_bytes + stats.in_flight_bytes);
    }
  });
  RunThreads(kThreads, [&](int t) {
    const StreamHandle stream = world.NewStream();
    uint8_t* const data = world.AllocateDevice(kSize);
    ASSERT_THAT(world.engine().OrderStreams(world.compute(), stream, kAfterOtherStream), IsOk());
    uint64_t last_out = 0;
    for (int round = 0; round < kRounds; ++round) {
      const std::vector<uint8_t> bytes = Pattern(1000 * t + round, kSize);
      world.WriteDevice(data, bytes, stream);
      const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kSize);
      const Transfer out = world.CopyOut(host, data, stream);
      EXPECT_GT(out.ticket().value, last_out);
      last_out = out.ticket().value;
      ASSERT_THAT(out.WaitOn(stream, kReuseAfterCopyOut), IsOk());
      world.WriteDevice(data, Pattern(7, kSize), stream);
      const Transfer in = world.CopyIn(host, data, stream);
      if (round % 3 == 0) {
        ASSERT_THAT(in.Wait(kLong), IsOk());
        world.engine().Poll();
        EXPECT_TRUE(out.IsDone());
      }
      ASSERT_THAT(in.WaitOn(stream, kReadAfterCopyIn), IsOk());
      EXPECT_EQ(world.ReadDevice(data, kSize, stream), bytes);
    }
  });
  stop = true;
  poller.join();
  ASSERT_THAT(world.engine().Drain(kLong), IsOk());
  EXPECT_EQ(world.engine().GetStats().d2h.completed_transfers,
            static_cast<uint64_t>(kThreads * kRounds));
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

TEST(EngineThreadsTest, MarksOfOneStreamFromManyThreadsAllGetDone) {
  EngineWorld world;
  RunThreads(kThreads, [&](int) {
    for (int i = 0; i < kRounds; ++i) {
      PINION_ASSERT_OK_AND_ASSIGN(const FenceTicket ticket, world.engine().Mark(world.compute()));
      ticket.timeline->Poll();
      ASSERT_THAT(ticket.timeline->Wait(ticket.value, kLong), IsOk());
      EXPECT_TRUE(ticket.IsDone());
    }
  });
}

TEST(EngineThreadsTest, APollerThatHangsInTheDeviceDoesNotHoldUpAnother) {
  FaultyWorld world;
  std::promise<void> hangs;
  std::promise<void> go_on;
  world.DuringCall("QueryEvent", 1, [&] {
    hangs.set_value();
    go_on.get_future().wait();
  });
  const Transfer out = world.CopyOut(kSize);
  ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());

  std::thread poller([&] { world.engine().Poll(); });
  hangs.get_future().wait();
  world.engine().Poll();
  EXPECT_TRUE(out.IsDone());
  const Transfer next = world.CopyOut(kSize);
  go_on.set_value();
  poller.join();

  EXPECT_THAT(next.Wait(kLong), IsOk());
  EXPECT_EQ(world.engine().GetStats().d2h.completed_transfers, 2u);
}

// A ticket covers all copies enqueued before it. A submission that is slow between its copy and its
// ticket must not be overtaken, or the wrong copy would count as done.
TEST(EngineThreadsTest, ASlowSubmissionIsNotOvertaken) {
  static thread_local bool copied = false;  // enqueued, without a ticket yet
  constexpr int kSlowCopies = 20;           // while all threads have copies left
  FaultyWorld world;
  uint8_t* const data = world.AllocateDevice(Pattern(1, kSize));
  std::atomic<int> copies{0};
  std::atomic<int> submitting{0};
  std::atomic<int> between{0};
  std::atomic<int> overtakers{0};
  world.device->FailCalls([&](const std::string& call, uint64_t) {
    if (call == "CopyAsync") {
      copied = true;
      if (between.fetch_add(1) != 0) overtakers.fetch_add(1);
      if (copies.fetch_add(1) >= kSlowCopies) return absl::OkStatus();
      while (submitting.load() < kThreads) std::this_thread::yield();
      // Gives them the chance to overtake. Beside busy programs a yield may cost milliseconds.
      for (int i = 0; i < 10; ++i) std::this_thread::yield();
    } else if (call == "RecordEvent" && std::exchange(copied, false)) {
      between.fetch_sub(1);
    }
    return absl::OkStatus();
  });

  RunThreads(kThreads, [&](int) {
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kSize);
    for (int i = 0; i < kRounds; ++i) {
      submitting.fetch_add(1);
      world.CopyOut(host, data);
      submitting.fetch_sub(1);
    }
  });

  EXPECT_EQ(overtakers.load(), 0);
}

// Runs an action once, after an event was recorded and before its thread continues.
class ActingDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  std::function<void()> after_record;

  absl::Status RecordEvent(EventHandle event, StreamHandle stream) override {
    absl::Status recorded = ForwardingDevice::RecordEvent(event, stream);
    if (const auto act = std::exchange(after_record, nullptr); act != nullptr) act();
    return recorded;
  }
};

// A mark that overtook another one between record and number would complete with it.
TEST(EngineThreadsTest, MarksOfOneStreamAreNumberedInItsOrder) {
  const std::shared_ptr<EmulatedMachine> machine =
      EmulatedMachine::Create(TestMachineOptions()).value();
  auto device = std::make_shared<ActingDevice>(machine->device(0));
  EngineWorld world(machine, device, {});
  std::thread other;
  std::promise<FenceTicket> marked;
  std::future<FenceTicket> late = marked.get_future();
  device->after_record = [&] {
    other = std::thread([&] {
      world.Jam(world.compute());
      marked.set_value(world.engine().Mark(world.compute()).value());
    });
    // Gives the other thread time; it must not finish.
    late.wait_for(std::chrono::milliseconds(100));
  };
  PINION_ASSERT_OK_AND_ASSIGN(const FenceTicket early, world.engine().Mark(world.compute()));
  const FenceTicket after = late.get();
  other.join();
  EXPECT_THAT(early.timeline->Wait(early.value, kLong), IsOk());
  EXPECT_FALSE(after.IsDone());
}

TEST(EngineThreadsTest, TheLastOwnerMayBeAnyThread) {
  EngineWorld world;
  uint8_t* const data = world.AllocateDevice(Pattern(1, kSize));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kSize);
    Transfer out = world.CopyOut(host, data);
    threads.emplace_back([host = std::move(host), out = std::move(out)]() mutable {
      host.reset();
      EXPECT_THAT(out.Wait(kLong), IsOk());
      out = Transfer();
    });
  }
  world.DestroyEngine();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace engine_threads_test
}  // namespace pinion::testing
