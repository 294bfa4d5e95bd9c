// Waits of copies and streams: all that are needed, and no others.

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/stream/stream_in_use.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/faulty_world.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace transfer_order_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kLong = absl::Seconds(30);

// Slow copies, so that the engine knows of no completed copy.
EmulatedOptions SlowCopies() {
  EmulatedOptions options = TestMachineOptions();
  options.faults.stall_copies_from = 1;
  options.faults.stall_ms = 10;
  return options;
}

TEST(TransferOrderTest, ABatchOfSeveralBuffersWaitsForTheOtherDirectionOnce) {
  EngineWorld world(SlowCopies());
  uint8_t* const data = world.AllocateDevice(4 * kMiB);
  CopyBatch batch(CopyDirection::kHostToDevice);
  for (int i = 0; i < 4; ++i) {
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
    world.CopyOut(host, data + i * kMiB);
    batch.Add(host, 0, data + i * kMiB, kMiB);
  }
  const uint64_t before = world.engine().GetStats().event_waits;
  ASSERT_THAT(world.engine().Submit(std::move(batch), world.compute()), IsOk());
  EXPECT_EQ(world.engine().GetStats().event_waits - before, 2u) << "compute, and the last copy out";
  ASSERT_THAT(world.engine().Drain(kLong), IsOk());
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

TEST(TransferOrderTest, ACopyWaitsForWhatItsStreamHasNotWaitedForYetOnly) {
  EngineWorld world(SlowCopies());
  uint8_t* const data = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  world.CopyOut(host, data);
  world.CopyIn(host, data);
  const EngineStats before = world.engine().GetStats();
  world.CopyIn(host, data);
  EXPECT_EQ(world.engine().GetStats().event_waits - before.event_waits, 1u) << "compute";
  EXPECT_EQ(world.engine().GetStats().event_waits_skipped, 0u);
}

TEST(TransferOrderTest, ACopyOfABufferWhoseCopiesAreDoneHasNoWaitToSkip) {
  EngineWorld world;
  uint8_t* const data = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  ASSERT_THAT(world.CopyOut(host, data).Wait(kLong), IsOk());
  const uint64_t before = world.engine().GetStats().event_waits;
  world.CopyIn(host, data);
  EXPECT_EQ(world.engine().GetStats().event_waits - before, 1u) << "compute";
  EXPECT_EQ(world.engine().GetStats().event_waits_skipped, 0u);
}

TEST(TransferOrderTest, WaitingForOneDevicesCopyIsNotWaitingForAnothers) {
  EmulatedOptions options = SlowCopies();
  options.device_count = 2;
  EngineWorld world(options);
  uint8_t* const data = world.AllocateDevice(kMiB, 0);
  uint8_t* const other_data = world.AllocateDevice(kMiB, 1);
  const std::shared_ptr<HostBuffer> own = world.NewHostBuffer(kMiB);
  const std::shared_ptr<HostBuffer> other = world.NewHostBuffer(kMiB);
  world.CopyOut(own, data, world.compute(0), 0);
  world.CopyIn(own, data, world.compute(0), 0);
  world.CopyOut(other, other_data, world.compute(1), 1);
  world.CopyIn(other, data, world.compute(0), 0);
  ASSERT_THAT(world.engine(0).Drain(kLong), IsOk());
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

// Later chunks follow in the copy stream's order, so a capture may begin meanwhile.
TEST(TransferOrderTest, OnlyTheFirstChunkIsOrderedAfterTheStream) {
  FaultyWorld world(Chunks(64 * kKiB));
  uint8_t* const data = world.AllocateDevice(kMiB);
  const StreamHandle stream = world.NewStream();
  world.DuringCall("CopyAsync", 2,
                   [&] { EXPECT_THAT(world.machine().SetCapturing(stream, true), IsOk()); });
  EXPECT_THAT(world.TryCopyIn(world.NewHostBuffer(kMiB), data, stream), IsOk());
  EXPECT_EQ(world.engine().GetStats().h2d.submitted_chunks, 16u);
  EXPECT_EQ(world.engine().GetStats().event_waits, 1u);
  ASSERT_THAT(world.machine().SetCapturing(stream, false), IsOk());
}

TEST(TransferOrderTest, AnOperatorsStreamIsAskedOnceWhetherItCaptures) {
  FaultyWorld world;
  uint8_t* const data = world.AllocateDevice(2 * kMiB);
  const std::shared_ptr<int> queries = world.CountCalls("IsCapturing");
  const StreamInUse in_use(world.engine().device(), world.compute());
  const Transfer out = world.CopyOut(world.NewHostBuffer(kMiB), data);
  world.CopyIn(world.NewHostBuffer(kMiB), data + kMiB);
  EXPECT_THAT(out.WaitOn(world.compute(), kAfterOtherStream), IsOk());
  EXPECT_EQ(*queries, 1);
}

TEST(TransferOrderTest, ACaptureThatBeginsWhileACopyWaitsForItsTurnIsNotSpoiled) {
  FaultyWorld world;
  uint8_t* const data = world.AllocateDevice(2 * kMiB);
  const StreamHandle stream = world.NewStream();
  absl::Status refused;
  std::thread other;
  world.DuringCall("CopyAsync", 1, [&] {
    other = std::thread([&] {
      refused = world.TryCopyIn(world.NewHostBuffer(kMiB), data + kMiB, stream).status();
    });
    // Gives the thread time to reach its turn.
    absl::SleepFor(absl::Milliseconds(50));
    EXPECT_THAT(world.machine().SetCapturing(stream, true), IsOk());
  });
  EXPECT_THAT(world.TryCopyIn(world.NewHostBuffer(kMiB), data), IsOk());
  other.join();
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("captur")));
  ASSERT_THAT(world.machine().SetCapturing(stream, false), IsOk());
}

TEST(TransferOrderTest, AStreamIsNotOrderedAfterItselfNorWhereTheSiteIsDisabled) {
  EngineWorld world;
  const StreamHandle stream = world.NewStream();
  const WaitSite& site = kAfterOtherStream;
  EXPECT_THAT(world.engine().OrderStreams(stream, stream, site), IsOk());
  const ScopedDisableWaitSite disabled(site);
  EXPECT_THAT(world.engine().OrderStreams(world.compute(), stream, site), IsOk());
  EXPECT_EQ(world.engine().GetStats().event_waits, 0u);
}

TEST(TransferOrderTest, AWaitForTheLastOfManyCopiesIsOneWait) {
  FaultyWorld world;
  Transfer last;
  for (int i = 0; i < 3; ++i) {
    last = world.CopyOut(kMiB);
  }
  const std::shared_ptr<int> waits = world.CountCalls("WaitEvent");
  EXPECT_THAT(last.Wait(kLong), IsOk());
  EXPECT_EQ(*waits, 1);
}

TEST(TransferOrderTest, SubmitAsksHowFarTheDeviceIsOnceManyArePending) {
  FaultyWorld world;
  uint8_t* const data = world.AllocateDevice(64);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(64);
  const std::shared_ptr<int> queries = world.CountCalls("QueryEvent");
  for (int i = 0; i < 17; ++i) world.CopyIn(host, data);
  EXPECT_EQ(*queries, 0) << "few are pending";
  world.CopyIn(host, data);
  EXPECT_GT(*queries, 0);
}

TEST(TransferOrderTest, ABusyDeviceIsAskedHowFarItIsOncePerSixteenSubmissions) {
  EmulatedOptions stuck = TestMachineOptions();
  stuck.faults.stalls = {{.at = 1}};
  FaultyWorld world({}, stuck);
  uint8_t* const data = world.AllocateDevice(64);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(64);
  const std::shared_ptr<int> queries = world.CountCalls("QueryEvent");
  for (int i = 0; i < 66; ++i) world.CopyIn(host, data);
  EXPECT_LE(*queries, 4 * 7) << "by halves: of 64 that is 7 each time";
}

// Chunks execute in order, so only the last one needs an event.
TEST(TransferOrderTest, ABatchIsOneEventHoweverManyChunksItHas) {
  FaultyWorld world(Chunks(64 * kKiB));
  uint8_t* const data = world.AllocateDevice(Pattern(1, kMiB));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  const std::shared_ptr<int> records = world.CountCalls("RecordEvent");
  const Transfer out = world.CopyOut(host, data);
  EXPECT_EQ(*records, 2) << "the compute's, and the batch's";
  EXPECT_EQ(world.engine().GetStats().d2h.submitted_chunks, 16u);
  EXPECT_EQ(world.engine().GetStats().d2h.in_flight_bytes, kMiB);
  EXPECT_EQ(out.ticket().value, 1u);
  ASSERT_THAT(out.Wait(kLong), IsOk());
  EXPECT_EQ(world.ReadHost(*host), Pattern(1, kMiB));
}

TEST(TransferOrderTest, PollFindsOutAboutBothDirections) {
  EngineWorld world;
  uint8_t* const data = world.AllocateDevice(2 * kMiB);
  const Transfer out = world.CopyOut(world.NewHostBuffer(kMiB), data);
  const Transfer in = world.CopyIn(world.NewHostBuffer(kMiB), data + kMiB);
  ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());
  EXPECT_FALSE(out.IsDone() || in.IsDone());
  world.engine().Poll();
  EXPECT_TRUE(out.IsDone() && in.IsDone());
}

}  // namespace transfer_order_test
}  // namespace pinion::testing
