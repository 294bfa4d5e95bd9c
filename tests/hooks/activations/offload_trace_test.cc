// Checks the ranges that a trace sink gets in a training step.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/recording_trace_sink.h"

namespace pinion::testing {
namespace {

uint64_t TotalBytes(const std::vector<RecordingTraceSink::Range>& ranges) {
  uint64_t bytes = 0;
  for (const RecordingTraceSink::Range& range : ranges) bytes += range.size_bytes;
  return bytes;
}

TEST(OffloadTrace, AStepsRangesCarryTheirBytesAndAllEnd) {
  Gradients plain;
  {
    EmuWorld world;
    const TestNet net(world.device(), at::kFloat);
    plain = TrainStep(net, nullptr);
  }
  auto sink = std::make_shared<RecordingTraceSink>();
  OffloadOptions options = SmallWindows(4 * kKiB);
  options.engine.trace = sink;
  EmuWorld world(MachineOptions(), options);
  const TestNet net(world.device(), at::kFloat);
  ExpectSameGradients(plain, TrainStep(net, world.session()));

  const OffloadStats stats = world.QuietStats();
  EXPECT_EQ(sink->open_ranges(), 0);
  EXPECT_EQ(sink->RangesNamed("pinion.scope").size(), 1u);
  EXPECT_EQ(sink->RangesNamed("pinion.end_scope").size(), 1u);
  EXPECT_EQ(sink->RangesNamed("pinion.unpack").size(), stats.unpacked);
  EXPECT_GE(sink->RangesNamed("pinion.pack").size(), stats.offloaded + stats.shared);
  EXPECT_GE(TotalBytes(sink->RangesNamed("pinion.pack")), stats.offloaded_bytes / 2);
  EXPECT_GT(TotalBytes(sink->RangesNamed("pinion.evict")), 0u);
  EXPECT_LE(TotalBytes(sink->RangesNamed("pinion.evict")), stats.offloaded_bytes);
  EXPECT_GT(sink->RangesNamed("pinion.prefetch").size(), 0u);
  EXPECT_EQ(TotalBytes(sink->RangesNamed("pinion.prefetch")) +
                TotalBytes(sink->RangesNamed("pinion.fetch")),
            stats.fetched_bytes);

  const EngineStats engine = world.session()->GetEngineStats(0);
  uint64_t copied_out = 0, copied_in = 0;
  for (const TransferRecord& transfer : sink->transfers()) {
    (transfer.direction == CopyDirection::kDeviceToHost ? copied_out : copied_in) +=
        transfer.size_bytes;
  }
  EXPECT_EQ(copied_out, engine.d2h.submitted_bytes);
  EXPECT_EQ(copied_in, engine.h2d.submitted_bytes);
  EXPECT_EQ(engine.h2d.copy_time.count, engine.h2d.submitted_chunks);
  EXPECT_EQ(sink->stalls().size(), engine.h2d.stall_time.count + engine.d2h.stall_time.count);
}

TEST(OffloadTrace, AScopeThatEndsOnAnotherThreadEndsNoRangeThere) {
  auto sink = std::make_shared<RecordingTraceSink>();
  OffloadOptions options = SmallWindows();
  options.engine.trace = sink;
  EmuWorld world(MachineOptions(), options);
  std::optional<OffloadScope> scope(std::in_place, world.session());
  std::thread([&scope] { scope.reset(); }).join();
  EXPECT_EQ(sink->RangesNamed("pinion.scope").size(), 1u);
  EXPECT_EQ(sink->open_ranges(), 1);
}

}  // namespace
}  // namespace pinion::testing
