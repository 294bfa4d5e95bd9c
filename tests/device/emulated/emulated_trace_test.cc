// Timeline files that the emulated machine writes.

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/host_arithmetic.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/tests/device/emulated/emulated_fixture.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace emulated_trace_test {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr double kExact = 1e-6;

using Events = std::vector<nlohmann::json>;

nlohmann::json TraceOf(const EmulatedMachine& machine) {
  const std::string path = ::testing::TempDir() + "/emulated_trace.json";
  EXPECT_THAT(machine.WriteChromeTrace(path), IsOk());
  std::ifstream file(path);
  const nlohmann::json trace = nlohmann::json::parse(file);
  std::remove(path.c_str());
  return trace;
}

// Returns the trace's events of one phase: "X" slices, "s" and "f" ends of arrows, "C" samples.
Events EventsOf(const EmulatedMachine& machine, const std::string& phase) {
  Events events;
  const nlohmann::json trace = TraceOf(machine);
  for (const nlohmann::json& event : trace["traceEvents"]) {
    if (event["ph"] == phase) events.push_back(event);
  }
  return events;
}

// Returns the slices whose names begin with `begin`.
Events SlicesOf(const EmulatedMachine& machine, const std::string& begin) {
  Events slices = EventsOf(machine, "X");
  std::erase_if(slices, [&begin](const nlohmann::json& slice) {
    return !slice["name"].get<std::string>().starts_with(begin);
  });
  return slices;
}

nlohmann::json Named(const Events& events, const std::string& name) {
  for (const nlohmann::json& event : events) {
    if (event["name"] == name) return event;
  }
  ADD_FAILURE() << "no " << name;
  return {{"ts", 0}, {"dur", 0}, {"tid", -1}, {"args", {{"bytes", 0}}}};
}

bool Holds(const nlohmann::json& slice, const nlohmann::json& at) {
  const double ts = slice["ts"], dur = slice["dur"], moment = at["ts"];
  return slice["pid"] == at["pid"] && slice["tid"] == at["tid"] && ts <= moment &&
         moment <= ts + dur;
}

class EmulatedTraceTest : public EmulatedFixture {
 protected:
  EmulatedTraceTest() { StartRecording(); }

  void StartRecording() {
    EmulatedOptions options = FreeHost();
    options.record_trace = true;
    Start(options);
  }

  // Copies a tensor out and in again, and waits for it.
  void OutAndIn() {
    data_ = OnDevice(kMiB);
    uint8_t* const host = Pinned(kMiB);
    const ScopedRange range(machine_->trace().get(), "step", 7);
    Launch("aten::make", {}, {{data_, kMiB}}, compute_);
    Order(compute_, out_);
    ASSERT_THAT(ToHost(host, data_, kMiB, out_), IsOk());
    Order(out_, in_);
    ASSERT_THAT(ToDevice(data_, host, kMiB / 2, in_), IsOk());
    Order(in_, compute_);
    Launch("aten::use", {{data_, kMiB}}, {}, compute_);
    Synchronize(compute_);
  }

  uint8_t* data_ = nullptr;
};

TEST_F(EmulatedTraceTest, TraceIsJsonWithARowPerStreamAndASlicePerPieceOfWork) {
  const auto [data, host] = MakeBuffers(kMiB);
  Launch("quote\" back\\slash \xff", {}, {{data, kMiB}}, compute_);
  Order(compute_, out_);
  ASSERT_THAT(ToHost(host, data, kMiB, out_), IsOk());
  Synchronize(out_);
  EXPECT_THAT(TraceOf(*machine_)["otherData"]["times"].get<std::string>(), HasSubstr("modelled"));
  std::vector<std::string> rows;
  std::map<std::pair<int, int>, std::string> row_at;
  for (const nlohmann::json& event : EventsOf(*machine_, "M")) {
    rows.push_back(event["args"]["name"]);
    if (event.contains("tid")) row_at[{event["pid"], event["tid"]}] = rows.back();
  }
  EXPECT_THAT(rows, ElementsAre("host, in modelled time", "pinning",
                                "emu:0, " + machine_->options().preset.description, "emu:0/default",
                                "emu:0/h2d", "emu:0/d2h", HasSubstr("stalls")));
  const Events slices = EventsOf(*machine_, "X");
  ASSERT_EQ(slices.size(), 3u);
  EXPECT_EQ(slices[2]["name"], "waits for copy D2H") << "the host does, in Synchronize";
  EXPECT_THAT(slices[0]["name"].get<std::string>(), HasSubstr("quote\""));
  EXPECT_EQ(slices[1]["name"], "copy D2H");
  EXPECT_EQ((row_at[{slices[1]["pid"], slices[1]["tid"]}]), "emu:0/d2h");
  EXPECT_EQ(slices[1]["args"]["bytes"], kMiB);
  EXPECT_NEAR(slices[1]["dur"].get<double>(), 3 + kMiB / 57.3e3, 1e-6);
  EXPECT_NEAR(slices[1]["ts"].get<double>(), slices[0]["dur"].get<double>(), 1e-6);
}

TEST_F(EmulatedTraceTest, KernelsNameTheirOperatorAndTheirBytes) {
  OutAndIn();
  const Events slices = EventsOf(*machine_, "X");
  const nlohmann::json kernel = Named(slices, "aten::use");
  EXPECT_EQ(kernel["args"]["operator"], "aten::use");
  EXPECT_EQ(kernel["args"]["bytes"], kMiB);
  EXPECT_FALSE(Named(slices, "copy D2H")["args"].contains("operator"));
}

TEST_F(EmulatedTraceTest, ACopyHasTheBytesOfAllItsPieces) {
  const auto [data, host] = MakeBuffers(kMiB);
  const CopyPiece in[] = {{data, host, 100}, {data + kKiB, host + kKiB, 20}};
  ASSERT_THAT(device_->CopyAsync(CopyDirection::kHostToDevice, in, compute_), IsOk());
  const CopyPiece out[] = {{host, data, 300}, {host + kKiB, data + kKiB, 40}};
  ASSERT_THAT(device_->CopyAsync(CopyDirection::kDeviceToHost, out, compute_), IsOk());
  Synchronize(compute_);
  const Events slices = EventsOf(*machine_, "X");
  EXPECT_EQ(Named(slices, "copy H2D")["args"]["bytes"], 120);
  EXPECT_EQ(Named(slices, "copy D2H")["args"]["bytes"], 340);
}

TEST_F(EmulatedTraceTest, ACopyIsNamedAfterWhereItsEndsLieAndHasTheBytesThatItReadsAndWrites) {
  EmulatedOptions options = TwoDevices(FreeHost());
  options.record_trace = true;
  Start(options);
  const auto [data, host] = MakeBuffers(kMiB);
  const StreamHandle elsewhere = machine_->default_stream(1);
  void* const there = machine_->device(1)->Allocate(kMiB, elsewhere).value();
  ASSERT_THAT(machine_->Copy(0, data, host, 100, compute_), IsOk());
  ASSERT_THAT(machine_->Copy(0, host, data, 200, compute_), IsOk());
  ASSERT_THAT(machine_->Copy(0, data + kKiB, data, 400, compute_), IsOk());
  ASSERT_THAT(machine_->SynchronizeDevice(0), IsOk());
  ASSERT_THAT(machine_->Copy(1, there, data, 300, elsewhere), IsOk());
  ASSERT_THAT(machine_->SynchronizeDevice(1), IsOk());
  std::map<std::string, int> bytes;
  for (const nlohmann::json& slice : SlicesOf(*machine_, "copy ")) {
    bytes[slice["name"]] = slice["args"]["bytes"];
  }
  EXPECT_THAT(bytes, ElementsAre(Pair("copy D2D", 800), Pair("copy D2H", 200),
                                 Pair("copy H2D", 100), Pair("copy P2P", 300)));
}

// Returns the trace's arrows as pairs of the indices of a copy out and a copy in.
std::vector<std::pair<int, int>> Arrows(const EmulatedMachine& machine) {
  const Events outs = SlicesOf(machine, "copy D2H"), ins = SlicesOf(machine, "copy H2D");
  const auto index_at = [](const Events& slices, const nlohmann::json& at) {
    for (size_t i = 0; i < slices.size(); ++i) {
      if (Holds(slices[i], at)) return static_cast<int>(i);
    }
    return -1;
  };
  const Events starts = EventsOf(machine, "s"), ends = EventsOf(machine, "f");
  EXPECT_EQ(starts.size(), ends.size());
  std::vector<std::pair<int, int>> arrows;
  for (size_t i = 0; i < starts.size(); ++i) {
    EXPECT_EQ(starts[i]["id"], ends[i]["id"]);
    arrows.emplace_back(index_at(outs, starts[i]), index_at(ins, ends[i]));
  }
  return arrows;
}

TEST_F(EmulatedTraceTest, ArrowsFollowTheBytesThroughCopiesThatOverlapAndHaveSeveralPieces) {
  constexpr uint64_t kPart = 100 * kKiB;
  struct Range {
    int first, parts;
  };
  const struct {
    std::vector<Range> outs;              // in sequence; a later one may overwrite bytes
    std::vector<std::vector<Range>> ins;  // one copy each
    std::vector<std::pair<int, int>> arrows;
  } cases[] = {
      {{{0, 1}}, {{{1, 1}}}, {}},                                // behind the range
      {{{1, 1}}, {{{0, 1}}}, {}},                                // in front of the range
      {{{0, 1}, {1, 1}}, {{{0, 2}}}, {{0, 0}, {1, 0}}},          // one piece that covers two
      {{{0, 1}, {3, 1}}, {{{3, 1}, {0, 1}}}, {{0, 0}, {1, 0}}},  // two pieces
      {{{0, 4}}, {{{0, 1}}, {{1, 1}}, {{1, 3}}}, {{0, 0}, {0, 1}, {0, 2}}},          // in chunks
      {{{0, 3}, {1, 1}}, {{{0, 1}}, {{1, 1}}, {{2, 1}}}, {{0, 0}, {1, 1}, {0, 2}}},  // the middle
      {{{0, 1}, {0, 1}}, {{{0, 1}}}, {{1, 0}}},                                      // all
      {{{0, 2}, {1, 2}}, {{{1, 1}}, {{0, 1}}}, {{1, 0}, {0, 1}}},                    // the end
      {{{1, 2}, {0, 2}}, {{{1, 1}}, {{2, 1}}}, {{1, 0}, {0, 1}}},  // the beginning
  };
  for (const auto& [outs, ins, arrows] : cases) {
    StartRecording();
    const auto [data, host] = MakeBuffers(4 * kPart);
    for (const Range& range : outs) {
      ASSERT_THAT(ToHost(host + range.first * kPart, data, range.parts * kPart, compute_), IsOk());
    }
    for (const std::vector<Range>& in : ins) {
      std::vector<CopyPiece> pieces;
      for (const Range& range : in) {
        const uint64_t offset = range.first * kPart;
        pieces.push_back({data + offset, host + offset, range.parts * kPart});
      }
      ASSERT_THAT(device_->CopyAsync(CopyDirection::kHostToDevice, pieces, compute_), IsOk());
    }
    Synchronize(compute_);
    EXPECT_EQ(Arrows(*machine_), arrows);
  }
}

TEST_F(EmulatedTraceTest, StallsAreOnTheirOwnRowAndAddUpToTheStatistics) {
  OutAndIn();
  const nlohmann::json row = Named(EventsOf(*machine_, "X"), "aten::use")["tid"];
  double stalled_ms = 0;
  for (const nlohmann::json& stall : SlicesOf(*machine_, "waits for copy ")) {
    EXPECT_NE(stall["tid"], row);
    stalled_ms += stall["dur"].get<double>() * 1e-3;
  }
  EXPECT_GT(stalled_ms, 0);
  EXPECT_NEAR(stalled_ms, machine_->time_stats(0).stalled_on_copies_ms, 1e-6);
}

TEST_F(EmulatedTraceTest, StallsWithWorkBetweenThemAreTwo) {
  const auto [data, host] = MakeBuffers(kMiB);
  for (int step = 0; step < 2; ++step) {
    Order(compute_, in_);
    ASSERT_THAT(ToDevice(data, host, kMiB, in_), IsOk());
    Order(in_, compute_);
    Launch("aten::use", {{data, kMiB}}, {}, compute_);
    Synchronize(compute_);
  }
  EXPECT_EQ(SlicesOf(*machine_, "waits for copy H2D").size(), 2u);
}

TEST_F(EmulatedTraceTest, AStallNamesTheCopyThatRunsAndNotWhatIsBehindIt) {
  uint8_t* const data = OnDevice(kMiB);
  uint8_t* const host = Pinned(2 * kMiB);
  Order(compute_, in_);
  ASSERT_THAT(ToDevice(data, host, kMiB, in_), IsOk());
  Order(in_, compute_);
  ASSERT_THAT(ToHost(host + kMiB, data, kMiB, in_), IsOk());
  Launch("aten::use", {{data, kMiB}}, {}, compute_);
  Synchronize(compute_);
  const Events slices = EventsOf(*machine_, "X");
  EXPECT_NEAR(Named(slices, "waits for copy H2D")["dur"], Named(slices, "copy H2D")["dur"], kExact);
}

// The statistics count each stream's stall. The row shows the time in which any stream stalls.
TEST_F(EmulatedTraceTest, TwoStreamsThatWaitAtOnceAreOneStallOfTheRowAndTwoOfTheStatistics) {
  const auto [data, host] = MakeBuffers(2 * kMiB);
  const StreamHandle other = device_->CreateStream("other").value();
  Order(compute_, in_);
  ASSERT_THAT(ToDevice(data, host, kMiB, in_), IsOk());
  Order(in_, compute_);
  ASSERT_THAT(ToDevice(data + kMiB, host + kMiB, kMiB, in_), IsOk());
  Order(in_, other);
  Launch("aten::first", {{data, kMiB}}, {}, compute_);
  Launch("aten::second", {{data + kMiB, kMiB}}, {}, other);
  EXPECT_THAT(machine_->SynchronizeDevice(0), IsOk());
  // Both streams wait for the first copy; one then waits for the second.
  const nlohmann::json copy = Named(EventsOf(*machine_, "X"), "copy H2D");
  const Events stalls = SlicesOf(*machine_, "waits for copy H2D");
  const double copy_us = copy["dur"];
  ASSERT_EQ(stalls.size(), 1u);
  EXPECT_NEAR(stalls[0]["ts"], copy["ts"], kExact);
  EXPECT_NEAR(stalls[0]["dur"], 2 * copy_us, kExact);
  EXPECT_NEAR(machine_->time_stats(0).stalled_on_copies_ms * 1e3, 3 * copy_us, kExact);
}

TEST_F(EmulatedTraceTest, StreamsThatWaitAtOnceForDifferentCopiesMakeNoEmptyStalls) {
  const auto [data, host] = MakeBuffers(2 * kMiB);
  const StreamHandle other = device_->CreateStream("other").value();
  Order(compute_, in_);
  Order(compute_, out_);
  ASSERT_THAT(ToDevice(data, host, kMiB, in_), IsOk());
  ASSERT_THAT(ToHost(host + kMiB, data + kMiB, kMiB, out_), IsOk());
  Order(in_, compute_);
  Order(out_, other);
  Launch("aten::first", {{data, kMiB}}, {}, compute_);
  Launch("aten::second", {{data + kMiB, kMiB}}, {}, other);
  EXPECT_THAT(machine_->SynchronizeDevice(0), IsOk());
  const Events stalls = SlicesOf(*machine_, "waits for copy ");
  EXPECT_EQ(stalls.size(), 2u) << "for one copy, and then for the rest of the other";
  for (const nlohmann::json& stall : stalls) EXPECT_GT(stall["dur"].get<double>(), 0) << stall;
}

TEST_F(EmulatedTraceTest, AGraphShowsTheDevicesMemory) {
  OutAndIn();
  ASSERT_THAT(Free(data_), IsOk());
  const Events samples = EventsOf(*machine_, "C");
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(samples[0]["args"]["bytes"], kMiB);
  EXPECT_NEAR(samples[0]["ts"].get<double>(), 0, kExact);
  EXPECT_EQ(samples[1]["args"]["bytes"], 0);
  EXPECT_NEAR(samples[1]["ts"].get<double>(), machine_->now_ms() * 1e3, kExact);
}

TEST_F(EmulatedTraceTest, ARangeOfTheHostSpansWhatItWaitedFor) {
  OutAndIn();
  const Events slices = EventsOf(*machine_, "X");
  const nlohmann::json step = Named(slices, "step"), use = Named(slices, "aten::use");
  EXPECT_EQ(step["args"]["bytes"], 7);
  EXPECT_NE(step["pid"], use["pid"]);
  EXPECT_NEAR(step["ts"].get<double>() + step["dur"].get<double>(),
              use["ts"].get<double>() + use["dur"].get<double>(), 1e-6);
}

TEST_F(EmulatedTraceTest, ARestartedTraceBeginsAtZeroWithTheMemoryThatIsInUse) {
  OutAndIn();
  machine_->RestartTrace();
  Launch("aten::later", {{data_, kMiB}}, {}, compute_);
  Synchronize(compute_);
  const Events slices = EventsOf(*machine_, "X");
  ASSERT_EQ(slices.size(), 1u);
  EXPECT_EQ(slices[0]["name"], "aten::later");
  EXPECT_NEAR(slices[0]["ts"].get<double>(), 0, 1e-6);
  const Events samples = EventsOf(*machine_, "C");
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_EQ(samples[0]["args"]["bytes"], kMiB);
  EXPECT_NEAR(samples[0]["ts"].get<double>(), 0, kExact);
}

TEST_F(EmulatedTraceTest, PinningIsOnARowOfItsOwn) {
  EmulatedOptions options = Options();
  options.record_trace = true;
  Start(options);
  Pinned(kMiB);
  const nlohmann::json pin = Named(EventsOf(*machine_, "X"), "pin host memory");
  EXPECT_EQ(pin["args"]["bytes"], kMiB);
  EXPECT_NEAR(pin["dur"].get<double>(), options.preset.pin_ms_per_gib * 1e3 / 1024, 1e-6);
}

TEST_F(EmulatedTraceTest, ArithmeticOfTheHostIsARangeOfItsThread) {
  {
    const ScopedRange range(machine_->trace().get(), "product");
    CountHostArithmetic(246'000'000);
  }
  const Events slices = EventsOf(*machine_, "X");
  const nlohmann::json arithmetic = Named(slices, "host arithmetic");
  EXPECT_EQ(arithmetic["args"]["bytes"], 246'000'000);
  EXPECT_NEAR(arithmetic["dur"].get<double>(), 1e3, kExact);  // us
  EXPECT_TRUE(Holds(Named(slices, "product"), arithmetic));
}

TEST_F(EmulatedTraceTest, WithoutARecordedTraceNobodyIsToldOfRanges) {
  Start(Options());
  EXPECT_EQ(machine_->trace(), nullptr);
  machine_->RestartTrace();
}

TEST_F(EmulatedTraceTest, TraceThatCannotBeWrittenSaysWhy) {
  Start(Options());
  EXPECT_THAT(machine_->WriteChromeTrace("/tmp/x.json"),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("record_trace")));
  EmulatedOptions options = Options();
  options.record_trace = true;
  Start(options);
  EXPECT_THAT(machine_->WriteChromeTrace("/nowhere/x.json"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("/nowhere/x.json")));
  EXPECT_THAT(
      machine_->WriteChromeTrace(""),
      StatusIs(absl::StatusCode::kUnavailable, HasSubstr("cannot write the trace to \"\"")));
  EXPECT_DEATH(machine_->trace()->BeginRange(nullptr, 0), "a range has a name");
}

}  // namespace emulated_trace_test
}  // namespace pinion
