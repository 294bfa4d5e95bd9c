// Bytes in flight to the device never exceed the window. A fetch waits for at most one window,
// without loss of bandwidth, and nothing else waits for it. All times are exact virtual times.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <random>
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
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/copy_lane.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/faulty_world.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace window_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kLong = absl::Seconds(60);

// A link so slow that 1 MiB represents 256 MiB, so that tests move little memory.
constexpr double kSlowdown = 256;

EmulatedOptions SlowLink(const std::string& preset) {
  EmulatedOptions options = TestMachineOptions();
  options.detect_races = false;
  options.preset = *FindPreset(preset);
  LinkModel& link = options.preset.link;
  for (double* gb_per_s : {&link.h2d_gb_per_s, &link.d2h_gb_per_s, &link.h2d_duplex_gb_per_s,
                           &link.d2h_duplex_gb_per_s}) {
    *gb_per_s /= kSlowdown;
  }
  return options;
}

double TransferMs(uint64_t size_bytes, double gb_per_s) {
  return static_cast<double>(size_bytes) / (gb_per_s * 1e6);
}

// --- The limit ---

TEST(WindowTest, ABatchOfTenWindowsNeverHasMoreThanOneInFlight) {
  for (const uint64_t window : {uint64_t{1}, uint64_t{100}, 64 * kKiB, 64 * kKiB + 1}) {
    for (const uint64_t pieces : {1, 7}) {
      SCOPED_TRACE(std::to_string(pieces) + " pieces, window " + std::to_string(window));
      EngineWorld world(TestMachineOptions(), Window(window));
      const uint64_t piece_bytes = 10 * window / pieces + 1;
      const uint64_t size_bytes = pieces * piece_bytes;
      uint8_t* const data = world.AllocateDevice(size_bytes);
      const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(Pattern(1, size_bytes));
      CopyBatch batch(CopyDirection::kHostToDevice);
      std::vector<uint8_t> expected(size_bytes);
      for (uint64_t i = 0; i < pieces; ++i) {  // reversed on the host: none are merged
        const uint64_t from = (pieces - 1 - i) * piece_bytes;
        batch.Add(host, from, data + i * piece_bytes, piece_bytes);
        const std::vector<uint8_t> all = Pattern(1, size_bytes);
        std::copy_n(all.begin() + from, piece_bytes, expected.begin() + i * piece_bytes);
      }

      const Transfer in = world.Submit(std::move(batch));

      const DirectionStats stats = world.engine().GetStats().h2d;
      EXPECT_LE(stats.peak_in_flight_bytes, window);
      EXPECT_EQ(stats.submitted_transfers, 1u);
      EXPECT_GE(stats.submitted_chunks, 10u);
      ASSERT_THAT(in.Wait(kLong), IsOk());
      EXPECT_EQ(world.ReadDevice(data, size_bytes), expected);
      EXPECT_EQ(world.engine().GetStats().h2d.in_flight_bytes, 0u);
      EXPECT_EQ(world.engine().GetStats().h2d.completed_transfers, 1u);
      EXPECT_THAT(world.machine().races(), IsEmpty());
    }
  }
}

TEST(WindowTest, OnALinkOfUnknownRateAChunkHas64Mib) {
  EmulatedOptions options = SlowLink("h100_pcie5");
  options.preset.link.rated_gb_per_s = 0;
  options.memory_bytes = 256 * kMiB;
  EngineWorld world(options);
  constexpr uint64_t kBytes = 128 * kMiB;
  const Transfer in = world.CopyIn(kBytes);
  EXPECT_EQ(world.engine().GetStats().h2d.submitted_chunks, 2u);
  EXPECT_THAT(in.Wait(kLong), IsOk());
}

TEST(WindowTest, OneTicketCoversAllChunks) {
  EngineWorld world(TestMachineOptions(), Window(64 * kKiB));
  uint8_t* const data = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(Pattern(1, kMiB));
  const Transfer in = world.CopyIn(host, data);
  EXPECT_FALSE(in.IsDone());
  EXPECT_EQ(in.ticket().value, world.engine().GetStats().h2d.submitted_chunks);
  ASSERT_EQ(host->tickets().size(), 1u);
  EXPECT_EQ(host->tickets()[0].value, in.ticket().value);
  ASSERT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());
  EXPECT_EQ(world.ReadDevice(data, kMiB), Pattern(1, kMiB));
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

// Returns the host's time for submitting a batch that takes much longer on the link.
double SubmitMs(EngineWorld& world, CopyBatch batch, uint64_t size_bytes) {
  batch.Add(world.NewHostBuffer(size_bytes), 0, world.AllocateDevice(size_bytes), size_bytes);
  const double before_ms = world.machine().now_ms();
  EXPECT_THAT(world.engine().Submit(std::move(batch), world.compute()), IsOk());
  return world.machine().now_ms() - before_ms;
}

// Each waiting copy out already owns pinned memory, so the window could limit nothing else.
TEST(WindowTest, ACopyOutOfTenWindowsNeverBlocksTheHost) {
  const EmulatedOptions machine = SlowLink("h100_pcie5");
  EngineWorld world(machine, Window(kMiB / 4));
  constexpr uint64_t kSize = 10 * kMiB / 4;
  const double submit_ms = SubmitMs(world, CopyBatch(CopyDirection::kDeviceToHost), kSize);
  EXPECT_LT(submit_ms, TransferMs(kSize, machine.preset.link.d2h_gb_per_s) / 20);
  const DirectionStats stats = world.engine().GetStats().d2h;
  EXPECT_EQ(stats.flow_control_waits, 0u);
  EXPECT_EQ(stats.submitted_chunks, 20u);
  EXPECT_EQ(stats.peak_in_flight_bytes, kSize);
}

TEST(WindowTest, ACopyInBlocksTheHostUnlessItsCallerBoundsWhatItFetches) {
  const EmulatedOptions machine = SlowLink("h100_pcie5");
  constexpr uint64_t kSize = 10 * kMiB / 4;
  const double copy_ms = TransferMs(kSize, machine.preset.link.h2d_gb_per_s);
  EngineWorld blocked(machine, Window(kMiB / 4));
  EXPECT_GT(SubmitMs(blocked, CopyBatch(CopyDirection::kHostToDevice), kSize), copy_ms / 2);
  EXPECT_GT(blocked.engine().GetStats().h2d.flow_control_waits, 0u);
  EngineWorld free(machine, Window(kMiB / 4));
  EXPECT_LT(SubmitMs(free, CopyBatch(CopyDirection::kHostToDevice, FlowControl::kCaller), kSize),
            copy_ms / 20);
  EXPECT_EQ(free.engine().GetStats().h2d.flow_control_waits, 0u);
}

// A host wait breaks some captures.
TEST(WindowTest, ABatchOfACapturingStreamIsRefusedBeforeItWaitsForRoom) {
  EngineWorld world(SlowLink("h100_pcie5"), Window(kMiB / 4));
  world.CopyIn(kMiB / 4);
  uint8_t* const data = world.AllocateDevice(kMiB / 4);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB / 4);
  const StreamHandle capturing = world.NewStream();
  ASSERT_THAT(world.machine().SetCapturing(capturing, true), IsOk());
  EXPECT_THAT(world.TryCopyIn(host, data, capturing),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("captures a graph")));
  EXPECT_EQ(world.engine().GetStats().h2d.flow_control_waits, 0u);
  EXPECT_THAT(world.TryCopyIn(host, data), IsOk());
  EXPECT_GT(world.engine().GetStats().h2d.flow_control_waits, 0u);
}

// On a stalled device the fetch would be blocked for as long as the stall.
TEST(WindowTest, ACallersFetchIsNotBlockedByABatchThatWaitsForRoom) {
  FaultyWorld world(Window(kMiB));
  uint8_t* const data = world.AllocateDevice(2 * kMiB);
  world.CopyIn(world.NewHostBuffer(kMiB), data);
  std::promise<void> blocked;
  std::promise<void> released;
  world.DuringCall("WaitEvent", 1, [&] {
    blocked.set_value();
    released.get_future().wait();
  });
  const std::shared_ptr<HostBuffer> prefetched = world.NewHostBuffer(kMiB);
  std::thread prefetch([&] { world.CopyIn(prefetched, data); });
  blocked.get_future().wait();
  CopyBatch batch(CopyDirection::kHostToDevice, FlowControl::kCaller);
  batch.Add(world.NewHostBuffer(kMiB), 0, data + kMiB, kMiB);
  std::future<absl::StatusOr<Transfer>> fetch = std::async(
      std::launch::async, [&] { return world.engine().Submit(std::move(batch), world.compute()); });
  EXPECT_EQ(fetch.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  released.set_value();
  prefetch.join();
  EXPECT_THAT(fetch.get(), IsOk());
}

// Backward needs the fetch at once, behind everything that was prefetched.
TEST(WindowTest, AFetchIsDoneWithinAWindowAndItsOwnTime) {
  constexpr uint64_t kWindow = kMiB;
  for (const std::string preset : {"a100_pcie4", "h100_pcie5", "gh200_c2c"}) {
    for (uint32_t seed = 1; seed <= 20; ++seed) {
      SCOPED_TRACE(preset + ", seed " + std::to_string(seed));
      const EmulatedOptions machine = SlowLink(preset);
      std::mt19937 random(seed);
      EngineWorld world(machine, Window(kWindow));
      uint8_t* const data = world.AllocateDevice(3 * kWindow);
      const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(3 * kWindow);
      for (int i = 1 + random() % 4; i > 0; --i) {
        CopyBatch prefetch(CopyDirection::kHostToDevice);
        prefetch.Add(host, 0, data, kWindow / 8 + random() % (2 * kWindow));
        ASSERT_THAT(world.engine().Submit(std::move(prefetch), world.compute()), IsOk());
      }
      const uint64_t fetch_bytes = 1 + random() % (kWindow / 4);
      CopyBatch fetch(CopyDirection::kHostToDevice);
      fetch.Add(host, 0, data, fetch_bytes);
      const double before_ms = world.machine().now_ms();

      const Transfer fetched = world.Submit(std::move(fetch));
      ASSERT_THAT(fetched.Wait(kLong), IsOk());

      // At most ten chunks are in flight, each with a fixed cost and host calls.
      constexpr double kFixedMs = 0.1;
      EXPECT_LT(world.machine().now_ms() - before_ms,
                TransferMs(kWindow + fetch_bytes, machine.preset.link.h2d_gb_per_s) + kFixedMs);
    }
  }
}

// Without the limit, the same fetch waits for all copies.
TEST(WindowTest, WithoutFlowControlAFetchWaitsForEverything) {
  const ScopedDisableWaitSite disabled(pinion::internal::kFlowControl);
  const EmulatedOptions machine = SlowLink("h100_pcie5");
  EngineWorld world(machine, Window(kMiB));
  uint8_t* const data = world.AllocateDevice(4 * kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(4 * kMiB);
  const double before_ms = world.machine().now_ms();
  world.CopyIn(host, data);
  const Transfer fetched = world.CopyIn(world.NewHostBuffer(100), data);
  ASSERT_THAT(fetched.Wait(kLong), IsOk());
  EXPECT_GT(world.machine().now_ms() - before_ms,
            TransferMs(4 * kMiB, machine.preset.link.h2d_gb_per_s));
}

// --- Its cost ---

// Returns the time of one copy in one driver call, in each of `directions` at once.
double RawMs(EngineWorld& world, const std::vector<CopyDirection>& directions, uint8_t* data,
             const HostBuffer& host, uint64_t size_bytes) {
  const std::shared_ptr<Device> device = world.machine().device(0);
  const double before_ms = world.machine().now_ms();
  std::vector<StreamHandle> streams;
  for (const CopyDirection direction : directions) {
    const bool out = direction == CopyDirection::kDeviceToHost;
    uint8_t* const on_device = data + (out ? size_bytes : 0);
    uint8_t* const on_host = static_cast<uint8_t*>(host.data()) + (out ? size_bytes : 0);
    const CopyPiece piece = {out ? on_host : on_device, out ? on_device : on_host, size_bytes};
    streams.push_back(*device->CreateStream("raw"));
    EXPECT_THAT(device->CopyAsync(direction, {&piece, 1}, streams.back()), IsOk());
  }
  for (const StreamHandle stream : streams) {
    EXPECT_THAT(device->SynchronizeStream(stream), IsOk());
  }
  return world.machine().now_ms() - before_ms;
}

TEST(WindowTest, ALargeBatchIsNearlyAsFastAsOneCopy) {
  constexpr uint64_t kSize = 8 * kMiB;  // 2 GiB on the real link
  for (const std::string preset : {"a100_pcie4", "h100_pcie5", "gh200_c2c"}) {
    for (const CopyDirection direction :
         {CopyDirection::kHostToDevice, CopyDirection::kDeviceToHost}) {
      SCOPED_TRACE(preset + ", " + CopyDirectionName(direction));
      EngineWorld world(SlowLink(preset), Window(kMiB));
      uint8_t* const data = world.AllocateDevice(2 * kSize);
      const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(2 * kSize);
      const double raw_ms = RawMs(world, {direction}, data, *host, kSize);

      const double before_ms = world.machine().now_ms();
      CopyBatch batch(direction);
      batch.Add(host, 0, data, kSize);
      ASSERT_THAT(world.engine().Submit(std::move(batch), world.compute()), IsOk());
      ASSERT_THAT(world.engine().Drain(kLong), IsOk());

      EXPECT_LT(world.machine().now_ms() - before_ms, raw_ms / 0.98);
    }
  }
}

TEST(WindowTest, BothDirectionsTogetherAreNearlyAsFastAsTwoCopies) {
  constexpr uint64_t kSize = 8 * kMiB;
  constexpr uint64_t kBatch = kMiB / 4;  // one thread serves both directions in turn
  for (const std::string preset : {"a100_pcie4", "h100_pcie5", "gh200_c2c"}) {
    SCOPED_TRACE(preset);
    EngineWorld world(SlowLink(preset), Window(kMiB));
    uint8_t* const data = world.AllocateDevice(2 * kSize);
    const std::shared_ptr<HostBuffer> in = world.NewHostBuffer(2 * kSize);
    const std::shared_ptr<HostBuffer> out = world.NewHostBuffer(2 * kSize);
    const double raw_ms = RawMs(world, {CopyDirection::kHostToDevice, CopyDirection::kDeviceToHost},
                                data, *in, kSize);

    // Feeds the direction with fewer bytes in flight, as two threads would.
    const double before_ms = world.machine().now_ms();
    uint64_t sent[2] = {};
    while (sent[0] < kSize || sent[1] < kSize) {
      world.engine().Poll();
      const EngineStats stats = world.engine().GetStats();
      const bool feed_in = sent[1] == kSize || (sent[0] < kSize && stats.h2d.in_flight_bytes <=
                                                                       stats.d2h.in_flight_bytes);
      CopyBatch batch(feed_in ? CopyDirection::kHostToDevice : CopyDirection::kDeviceToHost);
      uint64_t& done = sent[feed_in ? 0 : 1];
      batch.Add(feed_in ? in : out, done, data + (feed_in ? 0 : kSize) + done, kBatch);
      done += kBatch;
      ASSERT_THAT(world.engine().Submit(std::move(batch), world.compute()), IsOk());
    }
    ASSERT_THAT(world.engine().Drain(kLong), IsOk());

    EXPECT_LT(world.machine().now_ms() - before_ms, raw_ms / 0.97);
  }
}

// A device has one copy engine per direction. In cudf, small copies were delayed by 12 ms behind
// 200 MB (cudf#15620).
TEST(WindowTest, ASmallCopyOfSomebodyElseWaitsForOneChunkOnly) {
  constexpr uint64_t kSize = 160 * kMiB;
  for (const std::string preset : {"a100_pcie4", "h100_pcie5", "gh200_c2c"}) {
    SCOPED_TRACE(preset);
    EmulatedOptions machine = TestMachineOptions();
    machine.detect_races = false;
    machine.memory_bytes = kGiB;
    machine.preset = *FindPreset(preset);
    machine.preset.link.one_copy_at_a_time = true;
    EngineWorld world(machine);
    uint8_t* const data = world.AllocateDevice(kSize);
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kSize);
    const std::shared_ptr<HostBuffer> item = world.NewHostBuffer(kKiB);
    const StreamHandle other = world.NewStream();
    const double before_ms = world.machine().now_ms();
    const Transfer in = world.CopyIn(host, data);
    ASSERT_THAT(world.machine().Copy(0, data, item->data(), 4, other), IsOk());
    ASSERT_THAT(world.engine().device().SynchronizeStream(other), IsOk());
    EXPECT_LT(world.machine().now_ms() - before_ms, 0.75);
    EXPECT_FALSE(in.IsDone());
    ASSERT_THAT(in.Wait(kLong), IsOk());
    const double ideal_ms = TransferMs(kSize, machine.preset.link.h2d_gb_per_s);
    EXPECT_LT(world.machine().now_ms() - before_ms, ideal_ms / 0.95);
  }
}

// --- A batch that fails half way ---

constexpr uint64_t kChunk = 64 * kKiB;

EngineOptions TwoChunksInFlight() { return Window(2 * kChunk, WithoutRetries()); }

TEST(WindowTest, ABatchThatFailsHalfWayIsOverWhenItReturns) {
  FaultyWorld world(TwoChunksInFlight());
  uint8_t* const data = world.AllocateDevice(Pattern(1, 8 * kChunk));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(8 * kChunk);
  world.FailCall("CopyAsync", 4, Injected());

  EXPECT_THAT(world.TryCopyOut(host, data), IsInjected());

  // The host may write to the buffer at once, because no copy follows.
  for (const FenceTicket& ticket : host->tickets()) EXPECT_TRUE(ticket.IsDone());
  EXPECT_EQ(world.engine().GetStats().d2h.in_flight_bytes, 0u);
  EXPECT_EQ(world.engine().GetStats().d2h.submitted_chunks, 3u);
  EXPECT_EQ(world.engine().GetStats().d2h.submitted_transfers, 0u);
  EXPECT_EQ(world.engine().GetStats().d2h.failed_submits, 1u);
  world.WriteHost(*host, Pattern(2, 8 * kChunk));
  ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());
  EXPECT_EQ(world.ReadHost(*host), Pattern(2, 8 * kChunk));
  EXPECT_THAT(world.machine().races(), IsEmpty());

  const Transfer again = world.CopyOut(host, data);
  ASSERT_THAT(again.Wait(kLong), IsOk());
  EXPECT_EQ(world.ReadHost(*host), Pattern(1, 8 * kChunk));
}

TEST(WindowTest, AStickyErrorHalfWayLosesTheBatchAndKeepsItsBlocks) {
  FaultyWorld world(TwoChunksInFlight());
  uint8_t* const data = world.AllocateDevice(8 * kChunk);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(Pattern(1, 8 * kChunk));
  world.FailCall("CopyAsync", 4, DeviceLost());
  EXPECT_THAT(world.TryCopyIn(host, data), IsDeviceLost());
  ASSERT_EQ(host->tickets().size(), 1u);
  EXPECT_FALSE(host->tickets()[0].IsDone());
  EXPECT_EQ(world.ReadHost(*host), Pattern(1, 8 * kChunk));
}

// The enqueued chunks have no ticket yet when the device is lost.
TEST(WindowTest, ACopyOutThatIsLostAtAnyChunkKeepsItsBlocks) {
  for (const auto& [call, chunk] :
       {std::pair("CopyAsync", 1), std::pair("CopyAsync", 4), std::pair("RecordEvent", 8)}) {
    SCOPED_TRACE(std::string(call) + " of chunk " + std::to_string(chunk));
    FaultyWorld world(TwoChunksInFlight());
    uint8_t* const data = world.AllocateDevice(8 * kChunk);
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(8 * kChunk);
    world.device->FailCalls([call = std::string(call), chunk = chunk, copies = 0](
                                const std::string& made, uint64_t) mutable {
      copies += made == "CopyAsync" ? 1 : 0;
      return copies >= chunk && made == call ? DeviceLost() : absl::OkStatus();
    });
    EXPECT_THAT(world.TryCopyOut(host, data), IsDeviceLost());
    ASSERT_EQ(host->tickets().size(), 1u);
    EXPECT_FALSE(host->tickets()[0].IsDone());
  }
}

// A straggling rank or a debugger may stall the device for minutes before it continues.
TEST(WindowTest, ABatchThatStandsStillHalfWayIsWaitedFor) {
  EmulatedOptions machine = TestMachineOptions();
  machine.faults.stalls = {{.at = 2, .ms = 15 * 60'000}};
  FaultyWorld world(TwoChunksInFlight(), machine);
  uint8_t* const data = world.AllocateDevice(Pattern(1, 8 * kChunk));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(8 * kChunk);

  const Transfer in = world.CopyIn(host, data);
  ASSERT_THAT(in.Wait(kLong), IsOk());
  EXPECT_GT(world.machine().now_ms(), 15 * 60'000);
  EXPECT_THAT(world.engine().health(), IsOk());
}

TEST(WindowTest, ABatchThatFailedIsWaitedForHoweverLongItsChunksTake) {
  EmulatedOptions machine = TestMachineOptions();
  machine.faults.stalls = {{.at = 2, .ms = 15 * 60'000}};
  FaultyWorld world(TwoChunksInFlight(), machine);
  uint8_t* const data = world.AllocateDevice(8 * kChunk);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(8 * kChunk);
  world.FailCall("CopyAsync", 3, Injected());
  EXPECT_THAT(world.TryCopyIn(host, data), IsInjected());
  EXPECT_THAT(world.engine().health(), IsOk());
  ASSERT_EQ(host->tickets().size(), 1u);
  EXPECT_TRUE(host->tickets()[0].IsDone());
}

// A stuck chunk may write to the memory at any later time, so the memory must not be reused.
TEST(WindowTest, ABatchThatIsStuckHalfWayForEverPoisonsTheEngine) {
  EmulatedOptions machine = TestMachineOptions();
  machine.faults.stalls = {{.at = 2}};
  FaultyWorld world(TwoChunksInFlight(), machine);
  uint8_t* const data = world.AllocateDevice(8 * kChunk);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(8 * kChunk);

  EXPECT_THAT(world.TryCopyIn(host, data),
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr("neither finished nor taken back"), HasSubstr("no room"),
                             HasSubstr("its copy has not finished"))));

  EXPECT_THAT(world.engine().health(), StatusIs(absl::StatusCode::kInternal));
  ASSERT_EQ(host->tickets().size(), 1u);
  EXPECT_FALSE(host->tickets()[0].IsDone());
}

// No device copies across the border of two allocations, wherever it is in the batch. Unmerged
// pieces are cut at other places than the merged whole, so that each part is aligned.
TEST(WindowTest, NeighboursThatAreRefusedHalfWayGoOneByOneFromThereAndLoseNoByte) {
  struct Row {
    uint64_t piece_bytes;
    int refused_chunk;
  };
  constexpr uint64_t kSize = 4 * kChunk - 1;
  for (const Row& row : {Row{kChunk / 4 * 3, 3}, Row{5'000, 1}, Row{5'000, 2}, Row{5'000, 3}}) {
    SCOPED_TRACE(std::to_string(row.piece_bytes) + ", " + std::to_string(row.refused_chunk));
    FaultyWorld world(TwoChunksInFlight());
    uint8_t* const data = world.AllocateDevice(Pattern(1, kSize));
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kSize);
    world.FailCall("CopyAsync", row.refused_chunk,
                   absl::InvalidArgumentError("not inside one allocation"));
    CopyBatch batch(CopyDirection::kDeviceToHost);
    for (uint64_t at = 0; at < kSize; at += row.piece_bytes) {
      batch.Add(host, at, data + at, std::min(row.piece_bytes, kSize - at));
    }

    ASSERT_THAT(world.Submit(std::move(batch)).Wait(kLong), IsOk());

    EXPECT_EQ(world.ReadHost(*host), Pattern(1, kSize));
    EXPECT_EQ(world.engine().GetStats().d2h.submitted_bytes, kSize);
    EXPECT_EQ(world.engine().GetStats().d2h.completed_transfers, 1u);
  }
}

}  // namespace window_test
}  // namespace pinion::testing
