// A large batch is copied in chunks, without loss of bandwidth. Other copies wait for one chunk,
// and the host for none. All times are exact virtual times.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/fence.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/faulty_world.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace chunks_test {

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

TEST(ChunksTest, EveryByteOfABatchOfManyChunksLandsWhereItBelongs) {
  for (const uint64_t chunk : {uint64_t{1}, uint64_t{100}, 32 * kKiB, 32 * kKiB + 1}) {
    for (const uint64_t pieces : {1, 7}) {
      SCOPED_TRACE(std::to_string(pieces) + " pieces, chunks of " + std::to_string(chunk));
      EngineWorld world(TestMachineOptions(), Chunks(chunk));
      const uint64_t piece_bytes = 20 * chunk / pieces + 1;
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
      EXPECT_EQ(stats.submitted_transfers, 1u);
      EXPECT_GT(stats.submitted_chunks, 20u);
      ASSERT_THAT(in.Wait(kLong), IsOk());
      EXPECT_EQ(world.ReadDevice(data, size_bytes), expected);
      EXPECT_EQ(world.engine().GetStats().h2d.in_flight_bytes, 0u);
      EXPECT_EQ(world.engine().GetStats().h2d.completed_transfers, 1u);
      EXPECT_THAT(world.machine().races(), IsEmpty());
    }
  }
}

TEST(ChunksTest, AChunkTakesHalfAMillisecondAndHas16To128Mib) {
  struct Row {
    double rated_gb_per_s;  // 0: unknown
    uint64_t chunks;
  };
  constexpr uint64_t kBytes = 128 * kMiB + 1;
  for (const Row& row : {Row{0, 3}, Row{1, 9}, Row{64, 5}, Row{450, 2}}) {
    SCOPED_TRACE(row.rated_gb_per_s);
    EmulatedOptions options = SlowLink("h100_pcie5");
    options.preset.link.rated_gb_per_s = row.rated_gb_per_s;
    options.memory_bytes = 256 * kMiB;
    EngineWorld world(options);
    const Transfer in = world.CopyIn(kBytes);
    EXPECT_EQ(world.engine().GetStats().h2d.submitted_chunks, row.chunks);
    EXPECT_THAT(in.Wait(kLong), IsOk());
  }
}

TEST(ChunksTest, OneTicketCoversAllChunks) {
  for (const bool timed : {false, true}) {
    SCOPED_TRACE(timed);
    EngineOptions options = Chunks(32 * kKiB);
    options.time_transfers = timed;
    EngineWorld world(TestMachineOptions(), options);
    uint8_t* const data = world.AllocateDevice(kMiB);
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(Pattern(1, kMiB));
    const Transfer in = world.CopyIn(host, data);
    EXPECT_FALSE(in.IsDone());
    EXPECT_EQ(world.engine().GetStats().h2d.submitted_chunks, 32u);
    EXPECT_EQ(in.ticket().value, timed ? 32u : 1u);
    ASSERT_EQ(host->tickets().size(), 1u);
    EXPECT_EQ(host->tickets()[0].value, in.ticket().value);
    ASSERT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());
    EXPECT_EQ(world.ReadDevice(data, kMiB), Pattern(1, kMiB));
    EXPECT_THAT(world.machine().races(), IsEmpty());
  }
}

// --- Their cost ---

// The callers bound what they copy: by pinned memory to the host, by prefetch windows to the
// device.
TEST(ChunksTest, NoCopyBlocksTheHostHoweverManyChunksItHas) {
  const EmulatedOptions machine = SlowLink("h100_pcie5");
  constexpr uint64_t kSize = 20 * kMiB / 8;
  for (const CopyDirection direction :
       {CopyDirection::kHostToDevice, CopyDirection::kDeviceToHost}) {
    SCOPED_TRACE(CopyDirectionName(direction));
    EngineWorld world(machine, Chunks(kMiB / 8));
    CopyBatch batch(direction);
    batch.Add(world.NewHostBuffer(kSize), 0, world.AllocateDevice(kSize), kSize);
    const double before_ms = world.machine().now_ms();
    world.Submit(std::move(batch));
    EXPECT_LT(world.machine().now_ms() - before_ms,
              TransferMs(kSize, machine.preset.link.h2d_gb_per_s) / 20);
    const EngineStats stats = world.engine().GetStats();
    EXPECT_EQ(stats.h2d.submitted_chunks + stats.d2h.submitted_chunks, 20u);
  }
}

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

TEST(ChunksTest, ALargeBatchIsNearlyAsFastAsOneCopy) {
  constexpr uint64_t kSize = 8 * kMiB;  // 2 GiB on the real link
  for (const std::string preset : {"a100_pcie4", "h100_pcie5", "gh200_c2c"}) {
    for (const CopyDirection direction :
         {CopyDirection::kHostToDevice, CopyDirection::kDeviceToHost}) {
      SCOPED_TRACE(preset + ", " + CopyDirectionName(direction));
      EngineWorld world(SlowLink(preset), Chunks(kMiB / 2));
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

TEST(ChunksTest, BothDirectionsTogetherAreNearlyAsFastAsTwoCopies) {
  constexpr uint64_t kSize = 8 * kMiB;
  constexpr uint64_t kBatch = kMiB / 4;  // one thread serves both directions in turn
  for (const std::string preset : {"a100_pcie4", "h100_pcie5", "gh200_c2c"}) {
    SCOPED_TRACE(preset);
    EngineWorld world(SlowLink(preset), Chunks(kMiB / 2));
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
TEST(ChunksTest, ASmallCopyOfSomebodyElseWaitsForOneChunkOnly) {
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
constexpr double kForEver = std::numeric_limits<double>::infinity();

EngineOptions SmallChunks() { return Chunks(kChunk, WithoutRetries()); }

TEST(ChunksTest, ABatchThatFailsHalfWayIsOverWhenItReturns) {
  FaultyWorld world(SmallChunks());
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

TEST(ChunksTest, AStickyErrorHalfWayLosesTheBatchAndKeepsItsBlocks) {
  FaultyWorld world(SmallChunks());
  uint8_t* const data = world.AllocateDevice(8 * kChunk);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(Pattern(1, 8 * kChunk));
  world.FailCall("CopyAsync", 4, DeviceLost());
  EXPECT_THAT(world.TryCopyIn(host, data), IsDeviceLost());
  ASSERT_EQ(host->tickets().size(), 1u);
  EXPECT_FALSE(host->tickets()[0].IsDone());
  EXPECT_EQ(world.ReadHost(*host), Pattern(1, 8 * kChunk));
}

// The enqueued chunks have no ticket yet when the device is lost.
TEST(ChunksTest, ACopyOutThatIsLostAtAnyChunkKeepsItsBlocks) {
  for (const auto& [call, chunk] :
       {std::pair("CopyAsync", 1), std::pair("CopyAsync", 4), std::pair("RecordEvent", 8)}) {
    SCOPED_TRACE(std::string(call) + " of chunk " + std::to_string(chunk));
    FaultyWorld world(SmallChunks());
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

EmulatedOptions WithStallOfTheSecondCopy(double ms) {
  EmulatedOptions options = TestMachineOptions();
  options.faults.stalls = {{.at = 2, .ms = ms}};
  return options;
}

// A straggling rank or a debugger may stall the device for minutes before it continues.
TEST(ChunksTest, ABatchThatFailedIsWaitedForHoweverLongItsChunksTakeAndLogsThatLessAndLessOften) {
  struct Notice {
    const char* text;
    int after_minutes;
  };
  const Notice kNotices[] = {{"after 1m ", 1}, {"after 10m ", 11}, {"after 1h ", 71}};
  for (const int minutes : {5, 30, 180}) {
    SCOPED_TRACE(minutes);
    FaultyWorld world(SmallChunks(), WithStallOfTheSecondCopy(minutes * 60'000.0));
    uint8_t* const data = world.AllocateDevice(8 * kChunk);
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(8 * kChunk);
    world.FailCall("CopyAsync", 3, Injected());
    EXPECT_THAT(world.TryCopyIn(host, data), IsInjected());
    EXPECT_THAT(world.engine().health(), IsOk());
    ASSERT_EQ(host->tickets().size(), 1u);
    EXPECT_TRUE(host->tickets()[0].IsDone());
    EXPECT_THAT(world.log.text(),
                AllOf(HasSubstr("H2D on emu:0: after 1m submission 1"),
                      HasSubstr("its copy has not finished"), HasSubstr("waiting on")));
    for (const Notice& notice : kNotices) {
      const bool logged = world.log.text().find(notice.text) != std::string::npos;
      EXPECT_EQ(logged, minutes > notice.after_minutes) << notice.text;
    }
  }
}

TEST(ChunksTest, AStickyErrorEndsTheWaitForABatchThatFailed) {
  FaultyWorld world(SmallChunks(), WithStallOfTheSecondCopy(kForEver));
  uint8_t* const data = world.AllocateDevice(8 * kChunk);
  world.device->FailCalls([copies = 0, waits = 0](const std::string& call, uint64_t) mutable {
    if (call == "CopyAsync" && ++copies == 3) return Injected();
    return call == "WaitEvent" && ++waits == 3 ? DeviceLost() : absl::OkStatus();
  });
  EXPECT_THAT(world.TryCopyIn(world.NewHostBuffer(8 * kChunk), data), IsDeviceLost());
}

// A stuck chunk may write to the memory at any later time, so the memory must not be reused. Only
// an emulated device knows that it is stuck.
TEST(ChunksTest, ABatchThatIsStuckHalfWayForEverPoisonsTheEngine) {
  FaultyWorld world(SmallChunks(), WithStallOfTheSecondCopy(kForEver));
  uint8_t* const data = world.AllocateDevice(8 * kChunk);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(8 * kChunk);
  world.FailCall("CopyAsync", 3, Injected());

  EXPECT_THAT(world.TryCopyIn(host, data),
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr("neither finished nor taken back"), HasSubstr("injected"),
                             HasSubstr("its copy has not finished"))));

  EXPECT_THAT(world.engine().health(), StatusIs(absl::StatusCode::kInternal));
  ASSERT_EQ(host->tickets().size(), 1u);
  EXPECT_FALSE(host->tickets()[0].IsDone());
}

// No device copies across the border of two allocations, wherever it is in the batch. Unmerged
// pieces are cut at other places than the merged whole, so that each part is aligned.
TEST(ChunksTest, NeighboursThatAreRefusedHalfWayGoOneByOneFromThereAndLoseNoByte) {
  struct Row {
    uint64_t piece_bytes;
    int refused_chunk;
  };
  constexpr uint64_t kSize = 4 * kChunk - 1;
  for (const Row& row : {Row{kChunk / 4 * 3, 3}, Row{5'000, 1}, Row{5'000, 2}, Row{5'000, 3}}) {
    SCOPED_TRACE(std::to_string(row.piece_bytes) + ", " + std::to_string(row.refused_chunk));
    FaultyWorld world(SmallChunks());
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

}  // namespace chunks_test
}  // namespace pinion::testing
