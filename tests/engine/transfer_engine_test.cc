#include "pinion/engine/transfer_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/fence.h"
#include "pinion/device/device.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/faulty_world.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace transfer_engine_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kLong = absl::Seconds(30);

TEST(TransferEngineTest, BytesOfEverySizeComeBackUnchanged) {
  EngineWorld world;
  for (const uint64_t size_bytes : {uint64_t{1}, uint64_t{7}, uint64_t{255}, uint64_t{256},
                                    uint64_t{4097}, kMiB - 1, kMiB, 5 * kMiB + 3}) {
    SCOPED_TRACE(size_bytes);
    uint8_t* const data = world.AllocateDevice(size_bytes);
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(size_bytes);
    const std::vector<uint8_t> bytes = Pattern(size_bytes, size_bytes);

    world.WriteDevice(data, bytes);
    const Transfer out = world.CopyOut(host, data);
    ASSERT_THAT(out.WaitOn(world.compute(), kReuseAfterCopyOut), IsOk());
    world.WriteDevice(data, Pattern(99, size_bytes));
    const Transfer in = world.CopyIn(host, data);
    ASSERT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());

    EXPECT_EQ(world.ReadDevice(data, size_bytes), bytes);
    world.FreeDevice(data);
  }
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

TEST(TransferEngineTest, StreamsThatTheProgramHasDestroyedAreForgotten) {
  EngineWorld world;
  Device& device = world.engine().device();
  std::vector<std::weak_ptr<FenceTimeline>> timelines;
  const StreamHandle busy = world.NewStream();
  const FenceTicket held = world.engine().Mark(busy).value();
  for (int i = 0; i < 1000; ++i) {
    const StreamHandle stream = world.NewStream();
    timelines.push_back(world.engine().Mark(stream)->timeline);
    ASSERT_THAT(device.SynchronizeStream(stream), IsOk());
    ASSERT_THAT(device.DestroyStream(stream), IsOk());
  }
  EXPECT_LE(std::ranges::count_if(timelines, [](const auto& one) { return !one.expired(); }), 65);
  EXPECT_EQ(world.engine().Mark(busy)->timeline, held.timeline) << "somebody has its ticket";
}

TEST(TransferEngineTest, PiecesAtAnyOffsetLandWhereTheyBelong) {
  EngineWorld world;
  std::mt19937 random(7);
  constexpr uint64_t kSize = 64 * kKiB;
  uint8_t* const data = world.AllocateDevice(kSize);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kSize);
  const std::vector<uint8_t> bytes = Pattern(1, kSize);
  world.WriteDevice(data, bytes);

  // The device's pieces are in order, the host's in reverse order.
  CopyBatch batch(CopyDirection::kDeviceToHost);
  std::vector<uint8_t> expected(kSize);
  uint64_t begin = 0;
  while (begin < kSize) {
    const uint64_t size_bytes = std::min<uint64_t>(1 + random() % 3000, kSize - begin);
    const uint64_t host_begin = kSize - begin - size_bytes;
    batch.Add(host, host_begin, data + begin, size_bytes);
    std::copy_n(bytes.begin() + begin, size_bytes, expected.begin() + host_begin);
    begin += size_bytes;
  }
  const Transfer out = world.Submit(std::move(batch));
  ASSERT_THAT(out.Wait(kLong), IsOk());

  EXPECT_EQ(world.ReadHost(*host), expected);
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

TEST(TransferEngineTest, OneBatchMovesSeveralBuffersUnderOneTicket) {
  EngineWorld world;
  uint8_t* const data = world.AllocateDevice(Pattern(1, 300));
  std::vector<std::shared_ptr<HostBuffer>> hosts;
  CopyBatch batch(CopyDirection::kDeviceToHost);
  for (int i = 0; i < 3; ++i) {
    hosts.push_back(world.NewHostBuffer(100));
    batch.Add(hosts.back(), 0, data + 100 * i, 100);
  }
  const Transfer out = world.Submit(std::move(batch));

  for (const std::shared_ptr<HostBuffer>& host : hosts) {
    ASSERT_EQ(host->tickets().size(), 1u);
    EXPECT_EQ(host->tickets()[0].timeline, out.ticket().timeline);
    EXPECT_EQ(host->tickets()[0].value, out.ticket().value);
  }
}

// The engine alone orders the copy in after the copy out; the test does not wait.
TEST(TransferEngineTest, CopyInOfABlockWaitsForItsCopyOutByItself) {
  EngineWorld world;
  uint8_t* const from = world.AllocateDevice(Pattern(1, kMiB));
  uint8_t* const to = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);

  world.CopyOut(host, from);
  const Transfer in = world.CopyIn(host, to);
  ASSERT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());

  EXPECT_EQ(world.ReadDevice(to, kMiB), Pattern(1, kMiB));
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

// The buffer that was copied out last comes first in the batch.
TEST(TransferEngineTest, ABatchWaitsForTheLatestOfItsBuffers) {
  EngineWorld world;
  uint8_t* const data = world.AllocateDevice(4 * kMiB);
  const std::shared_ptr<HostBuffer> early = world.NewHostBuffer(kMiB);
  const std::shared_ptr<HostBuffer> late = world.NewHostBuffer(kMiB);
  world.WriteDevice(data, Pattern(1, 2 * kMiB));
  world.CopyOut(early, data);
  world.CopyOut(late, data + kMiB);
  CopyBatch batch(CopyDirection::kHostToDevice);
  batch.Add(late, 0, data + 3 * kMiB, kMiB);
  batch.Add(early, 0, data + 2 * kMiB, kMiB);
  const Transfer in = world.Submit(std::move(batch));
  ASSERT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());
  EXPECT_EQ(world.ReadDevice(data + 2 * kMiB, 2 * kMiB), Pattern(1, 2 * kMiB));
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

TEST(TransferEngineTest, CopyOutIntoABlockWaitsForReadsOfIt) {
  EngineWorld world;
  uint8_t* const from = world.AllocateDevice(Pattern(2, kMiB));
  uint8_t* const to = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(Pattern(1, kMiB));

  const Transfer in = world.CopyIn(host, to);
  world.CopyOut(host, from);
  ASSERT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());

  EXPECT_EQ(world.ReadDevice(to, kMiB), Pattern(1, kMiB));
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

// The caches of PyTorch and cub put a block on the free list before its event was recorded
// (NVIDIA/cub#156). Another thread then got memory that a copy was still writing.
TEST(TransferEngineTest, ABlockIsNotReusedBeforeItsCopiesAreDone) {
  EngineWorld world;
  uint8_t* const data = world.AllocateDevice(Pattern(1, kMiB));
  Kernel slow;
  slow.name = "slow";
  slow.flops = 1e14;  // seconds, so that no copy is done before it is waited for
  ASSERT_THAT(world.machine().Launch(0, world.compute(), slow), IsOk());
  std::set<void*> in_flight;
  Transfer last;
  for (int i = 0; i < 8; ++i) {
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
    EXPECT_TRUE(in_flight.insert(host->data()).second) << "block " << i << " was in flight";
    last = world.CopyOut(host, data);
  }
  EXPECT_GE(world.allocator().GetStats().deferred_bytes.current, 8 * kMiB);

  ASSERT_THAT(last.Wait(kLong), IsOk());

  const uint64_t pin_calls = world.allocator().GetStats().pin_calls;
  for (int i = 0; i < 8; ++i) {
    in_flight.erase(world.NewHostBuffer(kMiB)->data());
  }
  EXPECT_EQ(world.allocator().GetStats().pin_calls, pin_calls);
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

TEST(TransferEngineTest, ADirectionExecutesInTheOrderOfSubmission) {
  EngineWorld world;
  const StreamHandle other = world.NewStream();
  uint8_t* const data = world.AllocateDevice(1000);
  const std::shared_ptr<HostBuffer> first = world.NewHostBuffer(Pattern(1, 1000));
  const std::shared_ptr<HostBuffer> second = world.NewHostBuffer(Pattern(2, 1000));

  const Transfer a = world.CopyIn(first, data);
  const Transfer b = world.CopyIn(second, data, other);
  EXPECT_LT(a.ticket().value, b.ticket().value);
  ASSERT_THAT(b.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());

  EXPECT_EQ(world.ReadDevice(data, 1000), Pattern(2, 1000));
  ASSERT_THAT(b.Wait(kLong), IsOk());
  EXPECT_TRUE(a.IsDone());
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

TEST(TransferEngineTest, NeighboursGoToTheDeviceAsOnePiece) {
  EngineWorld world;
  uint8_t* const data = world.AllocateDevice(Pattern(1, 1000));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(1000);
  CopyBatch batch(CopyDirection::kDeviceToHost);
  for (int i = 9; i >= 0; --i) batch.Add(host, 100 * i, data + 100 * i, 100);
  const Transfer out = world.Submit(std::move(batch));
  ASSERT_THAT(out.Wait(kLong), IsOk());

  EXPECT_EQ(world.engine().GetStats().d2h.submitted_pieces, 1u);
  EXPECT_EQ(world.ReadHost(*host), Pattern(1, 1000));
}

// Adjacent blocks may belong to different pinned segments.
TEST(TransferEngineTest, NeighboursInTwoHostBlocksGoToTheDeviceAsTwoPieces) {
  EngineWorld world;
  uint8_t* const data = world.AllocateDevice(2 * kMiB);
  const std::shared_ptr<HostBuffer> first = world.NewHostBuffer(kMiB);
  const std::shared_ptr<HostBuffer> second = world.NewHostBuffer(kMiB);
  if (static_cast<char*>(first->data()) + kMiB != second->data()) {
    GTEST_SKIP() << "the blocks of hardened builds have red zones between them";
  }
  CopyBatch batch(CopyDirection::kDeviceToHost);
  batch.Add(first, 0, data, kMiB);
  batch.Add(second, 0, data + kMiB, kMiB);
  ASSERT_THAT(world.engine().Submit(std::move(batch), world.compute()), IsOk());
  EXPECT_EQ(world.engine().GetStats().d2h.submitted_pieces, 2u);
}

// Backward first fetches what was copied out last; this wait covers all earlier copies.
TEST(TransferEngineTest, ACopyInThatFollowsALaterOneWaitsForNoCopyOutAgain) {
  EmulatedOptions machine = TestMachineOptions();
  machine.faults.stall_copies_from = 1;
  machine.faults.stall_ms = 10;  // no copy is known to be done
  EngineWorld world(machine);
  uint8_t* const data = world.AllocateDevice(4 * kMiB);
  std::vector<std::shared_ptr<HostBuffer>> hosts;
  for (int i = 0; i < 4; ++i) {
    hosts.push_back(world.NewHostBuffer(kMiB));
    world.CopyOut(hosts[i], data + i * kMiB);
  }
  const uint64_t before = world.engine().GetStats().event_waits;
  for (int i = 3; i >= 0; --i) world.CopyIn(hosts[i], data + i * kMiB);
  EXPECT_EQ(world.engine().GetStats().event_waits - before, 4u + 1)
      << "each after compute, and one for all copies out";
  ASSERT_THAT(world.engine().Drain(kLong), IsOk());
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

TEST(TransferEngineTest, AWaitForADoneTransferMakesNoDeviceCall) {
  EngineWorld world;
  const Transfer out = world.CopyOut(100);
  ASSERT_THAT(out.Wait(kLong), IsOk());
  const uint64_t waits = world.engine().GetStats().event_waits;

  EXPECT_THAT(out.WaitOn(world.compute(), kReuseAfterCopyOut), IsOk());

  EXPECT_EQ(world.engine().GetStats().event_waits, waits);
  EXPECT_EQ(world.engine().GetStats().event_waits_skipped, 1u);
}

TEST(TransferEngineTest, ADefaultTransferIsDone) {
  const Transfer nothing;
  EXPECT_TRUE(nothing.IsDone());
  EXPECT_TRUE(nothing.ticket().IsDone());
  EXPECT_EQ(nothing.ticket().value, 0u);
  EXPECT_THAT(nothing.Wait(absl::ZeroDuration()), IsOk());
  EXPECT_THAT(nothing.WaitOn(StreamHandle(), kReuseAfterCopyOut), IsOk());
}

TEST(TransferEngineTest, EventsAreUsedAgainEvenIfNobodyPolls) {
  FaultyWorld world;
  uint8_t* const data = world.AllocateDevice(64);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(64);
  for (int i = 0; i < 500; ++i) {
    world.CopyIn(host, data);
    ASSERT_THAT(world.engine().Mark(world.compute()), IsOk());
    ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());
  }
  EXPECT_LT(world.device->live_events(), 100);
}

TEST(TransferEngineTest, MarkIsDoneWhenTheWorkBeforeItIs) {
  EngineWorld world;
  const StreamHandle stream = world.NewStream();
  uint8_t* const data = world.AllocateDevice(8 * kMiB);
  ASSERT_THAT(world.engine().OrderStreams(world.compute(), stream, kAfterOtherStream), IsOk());
  world.WriteDevice(data, Pattern(1, 8 * kMiB), stream);
  PINION_ASSERT_OK_AND_ASSIGN(const FenceTicket ticket, world.engine().Mark(stream));
  EXPECT_FALSE(ticket.IsDone());
  EXPECT_THAT(ticket.timeline->Wait(ticket.value, kLong), IsOk());
  EXPECT_TRUE(ticket.IsDone());
  // A completed ticket also lets the host read without a race.
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

TEST(TransferEngineTest, MarksOfOneStreamCountUpOnOneTimeline) {
  EngineWorld world;
  const absl::StatusOr<FenceTicket> a = world.engine().Mark(world.compute());
  const absl::StatusOr<FenceTicket> b = world.engine().Mark(world.compute());
  ASSERT_THAT(a, IsOk());
  ASSERT_THAT(b, IsOk());
  EXPECT_EQ(a->timeline, b->timeline);
  EXPECT_LT(a->value, b->value);
}

TEST(TransferEngineTest, OrderStreamsMakesTheLaterStreamWait) {
  EngineWorld world;
  const StreamHandle later = world.NewStream();
  uint8_t* const data = world.AllocateDevice(Pattern(1, kMiB));
  ASSERT_THAT(world.engine().OrderStreams(world.compute(), later, kAfterOtherStream), IsOk());
  EXPECT_EQ(world.ReadDevice(data, kMiB, later), Pattern(1, kMiB));
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

// A copy stream that waits for a capturing stream joins the graph, and querying its events then
// fails (pytorch#193982).
TEST(TransferEngineTest, ACapturingStreamIsRefused) {
  EngineWorld world;
  uint8_t* const data = world.AllocateDevice(100);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(100);
  const StreamHandle stream = world.NewStream();
  ASSERT_THAT(world.machine().SetCapturing(stream, true), IsOk());
  EXPECT_THAT(world.TryCopyIn(host, data, stream),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("captures a graph")));
  EXPECT_THAT(world.engine().Mark(stream), StatusIs(absl::StatusCode::kFailedPrecondition));
  ASSERT_THAT(world.machine().SetCapturing(stream, false), IsOk());
  EXPECT_THAT(world.TryCopyIn(host, data, stream), IsOk());
}

// In the opposite direction, a captured wait for an event outside of the graph breaks the capture.
TEST(TransferEngineTest, ACapturingStreamDoesNotWaitForACopy) {
  EngineWorld world;
  const StreamHandle stream = world.NewStream();
  const Transfer out = world.CopyOut(kMiB);
  const uint64_t waits = world.engine().GetStats().event_waits;
  ASSERT_THAT(world.machine().SetCapturing(stream, true), IsOk());
  EXPECT_THAT(world.engine().IsCapturing(stream), IsOkAndHolds(true));

  EXPECT_THAT(out.WaitOn(stream, kReuseAfterCopyOut),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("D2H on emu:0"), HasSubstr("captures a graph"))));
  EXPECT_EQ(world.engine().GetStats().event_waits, waits);

  EXPECT_THAT(out.Wait(kLong), IsOk());
  EXPECT_THAT(out.WaitOn(stream, kReuseAfterCopyOut), IsOk());
  EXPECT_EQ(world.engine().GetStats().event_waits, waits);
}

TEST(TransferEngineTest, ACapturingStreamFindsOutThatACopyIsDone) {
  EngineWorld world;
  const StreamHandle stream = world.NewStream();
  const Transfer out = world.CopyOut(100);
  ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());
  ASSERT_FALSE(out.IsDone());
  ASSERT_THAT(world.machine().SetCapturing(stream, true), IsOk());
  EXPECT_THAT(out.WaitOn(stream, kReuseAfterCopyOut), IsOk());
  EXPECT_TRUE(out.IsDone());
  EXPECT_EQ(world.engine().GetStats().event_waits_skipped, 1u);
}

TEST(TransferEngineTest, ACapturingStreamIsNotOrderedWithAnother) {
  EngineWorld world;
  const StreamHandle stream = world.NewStream();
  ASSERT_THAT(world.machine().SetCapturing(stream, true), IsOk());
  // The engine must refuse first: the device refuses only after the damage.
  const auto refused =
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("after the capture has ended"));
  EXPECT_THAT(world.engine().OrderStreams(stream, world.compute(), kAfterOtherStream), refused);
  EXPECT_THAT(world.engine().OrderStreams(world.compute(), stream, kAfterOtherStream), refused);
  EXPECT_EQ(world.engine().GetStats().event_waits, 0u);
  ASSERT_THAT(world.machine().SetCapturing(stream, false), IsOk());
  EXPECT_THAT(world.engine().IsCapturing(stream), IsOkAndHolds(false));
  EXPECT_THAT(world.engine().OrderStreams(world.compute(), stream, kAfterOtherStream), IsOk());
}

// The mark's event was recorded outside of the graph.
TEST(TransferEngineTest, AMarkFromBeforeACaptureIsDoneDuringIt) {
  EngineWorld world;
  const StreamHandle stream = world.NewStream();
  for (const bool polled : {true, false}) {
    PINION_ASSERT_OK_AND_ASSIGN(const FenceTicket ticket, world.engine().Mark(stream));
    ASSERT_THAT(world.machine().SetCapturing(stream, true), IsOk());
    if (polled) {
      ticket.timeline->Poll();
      EXPECT_TRUE(ticket.IsDone());
    } else {
      EXPECT_THAT(ticket.timeline->Wait(ticket.value, kLong), IsOk());
    }
    ASSERT_THAT(world.machine().SetCapturing(stream, false), IsOk());
  }
}

TEST(TransferEngineTest, DrainLeavesNothingInFlight) {
  EngineWorld world;
  for (int i = 0; i < 5; ++i) world.CopyOut(kMiB);
  ASSERT_THAT(world.engine().Drain(kLong), IsOk());
  const DirectionStats stats = world.engine().GetStats().d2h;
  EXPECT_EQ(stats.submitted_transfers, 5u);
  EXPECT_EQ(stats.completed_transfers, 5u);
  EXPECT_EQ(stats.completed_bytes, 5 * kMiB);
  EXPECT_EQ(stats.in_flight_bytes, 0u);
}

TEST(TransferEngineTest, StatsAddUpAndPrint) {
  EngineWorld world;
  for (int i = 0; i < 5; ++i) {
    world.CopyOut(kMiB);
    const DirectionStats stats = world.engine().GetStats().d2h;
    EXPECT_EQ(stats.submitted_bytes, stats.completed_bytes + stats.in_flight_bytes);
  }
  EXPECT_THAT(world.engine().GetStats().ToString(),
              AllOf(HasSubstr("D2H: 5 transfers (5 MiB"), HasSubstr("H2D: 0 transfers")));
}

TEST(TransferEngineTest, TheLinkIsMeasuredOnce) {
  EngineWorld world;
  PINION_ASSERT_OK_AND_ASSIGN(const LinkCalibration first,
                              world.engine().Calibrate(world.allocator()));
  EXPECT_GT(first.h2d_duplex_gb_per_s, 0);
  const double now_ms = world.machine().now_ms();
  PINION_ASSERT_OK_AND_ASSIGN(const LinkCalibration again,
                              world.engine().Calibrate(world.allocator()));
  EXPECT_EQ(again.h2d_duplex_gb_per_s, first.h2d_duplex_gb_per_s);
  EXPECT_EQ(world.machine().now_ms(), now_ms);
}

TEST(TransferEngineTest, ThreadsThatAskForTheLinkAtOnceMeasureItOnce) {
  const auto allocations = [](bool with_another_thread) {
    FaultyWorld world;
    std::atomic<int> count{0};
    std::thread other;
    std::promise<void> measured;
    world.device->FailCalls([&](const std::string& call, uint64_t) {
      if (call == "Allocate" && ++count == 1 && with_another_thread) {
        other = std::thread([&] {
          EXPECT_THAT(world.engine().Calibrate(world.allocator()), IsOk());
          measured.set_value();
        });
        // Gives the other thread time; it must not finish.
        measured.get_future().wait_for(std::chrono::milliseconds(100));
      }
      return absl::OkStatus();
    });
    EXPECT_THAT(world.engine().Calibrate(world.allocator()), IsOk());
    if (other.joinable()) other.join();
    return count.load();
  };
  const int alone = allocations(false);
  EXPECT_GT(alone, 0);
  EXPECT_EQ(allocations(true), alone);
}

TEST(TransferEngineTest, ACalibrationThatFailedIsMadeAgain) {
  FaultyWorld world;
  TransferEngine& engine = world.engine();
  world.FailNext("Allocate", absl::UnavailableError("busy"));
  EXPECT_THAT(engine.Calibrate(world.allocator()),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("busy")));
  PINION_ASSERT_OK_AND_ASSIGN(const LinkCalibration link, engine.Calibrate(world.allocator()));
  EXPECT_GT(link.h2d.gb_per_s, 0);
}

TEST(TransferEngineTest, APoisonedEngineHasForgottenItsLink) {
  FaultyWorld world;
  ASSERT_THAT(world.engine().Calibrate(world.allocator()), IsOk());
  world.FailNext("CreateEvent", DeviceLost());
  EXPECT_THAT(world.engine().Mark(world.compute()), StatusIs(absl::StatusCode::kInternal));
  EXPECT_THAT(world.engine().Calibrate(world.allocator()), StatusIs(absl::StatusCode::kInternal));
}

TEST(TransferEngineTest, ADeviceThatFailsForGoodDuringACalibrationPoisonsTheEngine) {
  FaultyWorld world;
  world.FailNext("Allocate", DeviceLost());
  EXPECT_THAT(world.engine().Calibrate(world.allocator()),
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr("calibration"), HasSubstr("an ECC error"))));
  EXPECT_THAT(world.engine().health(), StatusIs(absl::StatusCode::kInternal));
}

TEST(TransferEngineTest, TransfersAndTicketsOutliveTheEngine) {
  EngineWorld world;
  uint8_t* const data = world.AllocateDevice(Pattern(1, 1000));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(1000);
  const Transfer out = world.CopyOut(host, data);
  world.DestroyEngine();
  EXPECT_TRUE(out.IsDone());
  EXPECT_THAT(out.Wait(kLong), IsOk());
  EXPECT_EQ(world.ReadHost(*host), Pattern(1, 1000));
}

TEST(TransferEngineTest, TheDefaultsAreThoseOfTheDocumentation) {
  const EngineOptions options;
  EXPECT_EQ(options.max_chunk_bytes, 128 * kMiB);
  EXPECT_EQ(options.drain_timeout, absl::Seconds(60));
  EXPECT_EQ(options.transient_retries, 2);
  EXPECT_FALSE(options.time_transfers);
}

TEST(TransferEngineTest, BadOptionsAreRefusedByName) {
  const std::pair<void (*)(EngineOptions&), const char*> rows[] = {
      {[](auto& options) { options.max_chunk_bytes = 0; }, "max_chunk_bytes"},
      {[](auto& options) { options.drain_timeout = absl::ZeroDuration(); }, "drain_timeout"},
      {[](auto& options) { options.transient_retries = -1; }, "transient_retries is -1"},
  };
  for (const auto& [spoil, named] : rows) {
    EngineOptions options;
    spoil(options);
    EXPECT_THAT(options.Validate(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(named)));
  }
  EXPECT_THAT(EngineOptions().Validate(), IsOk());
}

TEST(TransferEngineTest, WithoutADeviceThereIsNone) {
  EXPECT_THAT(TransferEngine::Create({}, nullptr),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("device is null; pass")));
}

TEST(TransferEngineTest, AnEmptyBatchIsRefused) {
  EngineWorld world;
  for (const CopyDirection direction :
       {CopyDirection::kHostToDevice, CopyDirection::kDeviceToHost}) {
    EXPECT_THAT(world.engine().Submit(CopyBatch(direction), world.compute()),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("Submit of an empty batch: add a piece")));
  }
  EXPECT_EQ(world.engine().GetStats().h2d.failed_submits, 0u);
}

}  // namespace transfer_engine_test
}  // namespace pinion::testing
