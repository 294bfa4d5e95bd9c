#include "pinion/device/trace/chrome_trace_sink.h"

#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/device.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace chrome_trace_sink_test {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

class Written {
 public:
  explicit Written(const ChromeTraceSink& sink) {
    const std::string path = ::testing::TempDir() + "/chrome_trace_sink_test.json";
    EXPECT_THAT(sink.Write(path), IsOk());
    std::ifstream file(path);
    json_ = nlohmann::json::parse(file);
    std::remove(path.c_str());
    for (const nlohmann::json& event : json_["traceEvents"]) {
      const int row = event.value("tid", -1);
      if (event["ph"] == "M") names_[{event["pid"], row}] = event["args"]["name"];
      if (event["ph"] == "X") slices_.push_back(event);
    }
  }

  const std::vector<nlohmann::json>& slices() const { return slices_; }
  std::string ProcessOf(const nlohmann::json& slice) const { return names_.at({slice["pid"], -1}); }
  std::string RowOf(const nlohmann::json& slice) const {
    return names_.at({slice["pid"], slice["tid"]});
  }
  const nlohmann::json& json() const { return json_; }
  std::string host_name() const { return names_.at({0, -1}); }

 private:
  nlohmann::json json_;
  std::map<std::pair<int, int>, std::string> names_;
  std::vector<nlohmann::json> slices_;
};

TEST(ChromeTraceSinkTest, RangesNestOnTheirThreadsRow) {
  ChromeTraceSink sink;
  {
    const ScopedRange outer(&sink, "outer", 4096);
    const ScopedRange inner(&sink, "inner");
  }
  std::thread([&] { const ScopedRange other(&sink, "other"); }).join();

  const Written trace(sink);
  ASSERT_EQ(trace.slices().size(), 3);
  const nlohmann::json &inner = trace.slices()[0], &outer = trace.slices()[1],
                       &other = trace.slices()[2];
  EXPECT_EQ(inner["name"], "inner");
  EXPECT_EQ(outer["name"], "outer");
  EXPECT_EQ(outer["args"]["bytes"], 4096);
  EXPECT_FALSE(inner.contains("args"));
  EXPECT_LE(outer["ts"].get<double>(), inner["ts"].get<double>());
  EXPECT_GE(outer["ts"].get<double>() + outer["dur"].get<double>(),
            inner["ts"].get<double>() + inner["dur"].get<double>());
  EXPECT_EQ(trace.RowOf(inner), trace.RowOf(outer));
  EXPECT_NE(trace.RowOf(other), trace.RowOf(outer));
  EXPECT_EQ(trace.ProcessOf(other), "host");
  EXPECT_EQ(trace.json()["otherData"]["times"], "measured");
}

TEST(ChromeTraceSinkTest, TransfersLieOnTheirDirectionsRowAndStallsOnTheirStreams) {
  ChromeTraceSink sink;
  const double now_ms = SteadyClockMs();
  sink.OnTransfer({.device = "cuda:0",
                   .direction = CopyDirection::kDeviceToHost,
                   .number = 7,
                   .size_bytes = 1 << 20,
                   .pieces = 2,
                   .submitted_ms = now_ms,
                   .start_ms = now_ms + 1,
                   .end_ms = now_ms + 3.5});
  sink.OnTransfer({.device = "cuda:1", .start_ms = now_ms, .end_ms = now_ms + 1});
  int streams[2];
  for (int& stream : streams) {
    sink.OnStall({.device = "cuda:0",
                  .stream = StreamHandle(&stream),
                  .wait_site = "kUnpackAfterCopyIn",
                  .transfer_number = 3,
                  .start_ms = now_ms + 2,
                  .end_ms = now_ms + 3});
  }

  const Written trace(sink);
  std::vector<std::pair<std::string, std::string>> places;
  for (const nlohmann::json& slice : trace.slices()) {
    places.emplace_back(trace.ProcessOf(slice), trace.RowOf(slice));
  }
  EXPECT_THAT(places, ElementsAre(Pair("cuda:0", "D2H"), Pair("cuda:1", "H2D"),
                                  Pair("cuda:0", "stalls of stream 1"),
                                  Pair("cuda:0", "stalls of stream 2")));
  const nlohmann::json& copy = trace.slices()[0];
  EXPECT_EQ(copy["name"], "copy D2H");
  EXPECT_NEAR(copy["dur"].get<double>(), 2500, 1e-3);
  EXPECT_GE(copy["ts"].get<double>(), 1000);
  EXPECT_LT(copy["ts"].get<double>(), 1e9) << "times begin with the sink, not with the host";
  EXPECT_EQ(copy["args"]["bytes"], 1 << 20);
  EXPECT_EQ(copy["args"]["transfer"], 7);
  EXPECT_EQ(trace.slices()[2]["name"], "kUnpackAfterCopyIn");
}

TEST(ChromeTraceSinkTest, ARestartForgetsWhatWasBefore) {
  ChromeTraceSink sink;
  { const ScopedRange range(&sink, "warm-up"); }
  sink.Restart();
  { const ScopedRange range(&sink, "step"); }
  const Written trace(sink);
  ASSERT_EQ(trace.slices().size(), 1);
  EXPECT_EQ(trace.slices()[0]["name"], "step");
  EXPECT_GE(trace.slices()[0]["ts"].get<double>(), 0);
}

TEST(ChromeTraceSinkTest, WhatIsNotKeptAnyMoreIsCounted) {
  ChromeTraceSink sink(/*max_slices=*/2);
  for (int i = 0; i < 5; ++i) const ScopedRange range(&sink, "range");
  const Written trace(sink);
  EXPECT_EQ(trace.slices().size(), 2);
  EXPECT_THAT(trace.host_name(), HasSubstr("(3 slices"));
  sink.Restart();
  EXPECT_EQ(Written(sink).host_name(), "host");
}

TEST(ChromeTraceSinkTest, WhatARecordDoesNotSayIsNotWritten) {
  ChromeTraceSink sink;
  int stream;
  sink.OnTransfer({.device = "cuda:0", .end_ms = SteadyClockMs() + 1});
  sink.OnStall(
      {.device = "cuda:0", .stream = StreamHandle(&stream), .end_ms = SteadyClockMs() + 1});
  const Written trace(sink);
  ASSERT_EQ(trace.slices().size(), 2u);
  for (const nlohmann::json& slice : trace.slices()) {
    EXPECT_FALSE(slice.contains("args"));
    EXPECT_EQ(slice["ts"], 0) << "its beginning is unknown";
  }
}

TEST(ChromeTraceSinkTest, AFileThatCannotBeWrittenIsNamed) {
  EXPECT_THAT(ChromeTraceSink().Write("/nowhere/x.json"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("/nowhere/x.json")));
  EXPECT_THAT(ChromeTraceSink().Write("/dev/full"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("No space left")));
}

TEST(ChromeTraceSinkTest, ARangeThatNobodyEnteredCannotBeLeft) {
  ChromeTraceSink sink;
  EXPECT_DEATH(sink.EndRange(), "EndRange without BeginRange");
}

TEST(ChromeTraceSinkTest, ARangeThatHasNoNameCannotBeEntered) {
  ChromeTraceSink sink;
  EXPECT_DEATH({ const ScopedRange range(&sink, nullptr); }, "a range has a name");
  EXPECT_DEATH(sink.BeginRange(nullptr, 0), "a range has a name");
  StallRecord stall;
  stall.wait_site = nullptr;
  EXPECT_DEATH(sink.OnStall(stall), "a stall names its wait");
  const ScopedRange nowhere(nullptr, nullptr);
}

}  // namespace chrome_trace_sink_test
}  // namespace pinion
