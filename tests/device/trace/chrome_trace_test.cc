#include "pinion/device/trace/chrome_trace.h"

#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace chrome_trace_test {

using nlohmann::json;
using ::pinion::testing::IsOk;

std::string Written(const ChromeTrace& trace) {
  const std::string path = ::testing::TempDir() + "/chrome_trace_test.json";
  EXPECT_THAT(trace.Write(path), IsOk());
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  std::remove(path.c_str());
  return text.str();
}

TEST(ChromeTraceTest, AFileHasEveryFieldThatIsSaidAndNoOther) {
  ChromeTrace trace("modelled", /*host=*/0, "host", /*origin_ms=*/0);
  trace.NameProcess(1, "emu:0");
  trace.NameRow(1, 0, "d\xC3\xBC");  // in UTF-8
  trace.Add(ChromeTrace::Slice{.process = 1,
                               .row = 2,
                               .name = "copy",
                               .start_ms = 1,
                               .end_ms = 4,
                               .size_bytes = 1,
                               .transfer_number = 1,
                               .operator_name = "aten::add",
                               .arrow_from = 5});
  trace.Add(ChromeTrace::Slice{
      .process = 1, .row = 3, .name = "back", .end_ms = 8, .arrows_to = {5, 6}});  // no 6 exists
  trace.AddSample({.process = 1, .name = "memory", .time_ms = 2, .value_bytes = 9});
  EXPECT_EQ(trace.slice_count(), 2u);
  const json names = {
      {{"ph", "M"}, {"name", "process_name"}, {"pid", 0}, {"args", {{"name", "host"}}}},
      {{"ph", "M"}, {"name", "process_name"}, {"pid", 1}, {"args", {{"name", "emu:0"}}}},
      {{"ph", "M"},
       {"name", "thread_name"},
       {"pid", 1},
       {"tid", 0},
       {"args", {{"name", "d\xC3\xBC"}}}}};
  const auto arrow = [](const char* phase, int row, double time_us) {
    return json{{"ph", phase}, {"id", 1},    {"cat", "copies"}, {"name", "comes back"},
                {"pid", 1},    {"tid", row}, {"ts", time_us}};
  };
  json events = names;
  events.push_back({{"ph", "X"},
                    {"name", "copy"},
                    {"pid", 1},
                    {"tid", 2},
                    {"ts", 1000.0},
                    {"dur", 3000.0},
                    {"args", {{"bytes", 1}, {"transfer", 1}, {"operator", "aten::add"}}}});
  events.push_back(
      {{"ph", "X"}, {"name", "back"}, {"pid", 1}, {"tid", 3}, {"ts", 0.0}, {"dur", 8000.0}});
  events.push_back(arrow("s", 2, 2500));
  events.push_back(arrow("f", 3, 4000));
  events.back()["bp"] = "e";
  events.push_back(
      {{"ph", "C"}, {"name", "memory"}, {"pid", 1}, {"ts", 2000.0}, {"args", {{"bytes", 9}}}});
  json expected = {
      {"displayTimeUnit", "ms"}, {"otherData", {{"times", "modelled"}}}, {"traceEvents", events}};
  EXPECT_EQ(Written(trace), expected.dump() + "\n");
  trace.Restart(0);
  expected["traceEvents"] = names;
  EXPECT_EQ(Written(trace), expected.dump() + "\n");
}

TEST(ChromeTraceTest, WhatLiesBeforeTheOriginIsCutOff) {
  ChromeTrace trace("measured", 7, "host", /*origin_ms=*/10);
  const auto add = [&trace](double start_ms, double end_ms) {
    trace.Add({.process = 7, .name = "slice", .start_ms = start_ms, .end_ms = end_ms});
    return trace.slice_count();
  };
  EXPECT_EQ(add(8, 10), 0u);
  EXPECT_EQ(add(8, 12), 1u);
  EXPECT_EQ(add(11, 14), 2u);
  const json written = json::parse(Written(trace));
  EXPECT_EQ(written["traceEvents"][0]["args"]["name"], "host");
  EXPECT_EQ(written["traceEvents"][1]["ts"], 0);
  EXPECT_EQ(written["traceEvents"][1]["dur"], 2000);
  EXPECT_EQ(written["traceEvents"][2]["ts"], 1000);
  EXPECT_EQ(written["traceEvents"][2]["dur"], 3000);
  trace.Restart(20);
  EXPECT_EQ(trace.slice_count(), 0u);
  EXPECT_EQ(add(19, 20), 0u);
  EXPECT_EQ(add(19, 21), 1u);
}

TEST(ChromeTraceTest, ARangeIsASliceOfItsThreadsRow) {
  ChromeTrace trace("measured", 7, "host", 0);
  trace.BeginRange("outer", 3, 1);
  trace.BeginRange("inner", 0, 2);
  const ChromeTrace::Slice inner = trace.EndRange(4);
  const ChromeTrace::Slice outer = trace.EndRange(8);
  EXPECT_EQ(inner.name, "inner");
  EXPECT_EQ(inner.start_ms, 2);
  EXPECT_EQ(inner.end_ms, 4);
  EXPECT_EQ(inner.row, outer.row);
  EXPECT_EQ(outer.process, 7);
  EXPECT_EQ(outer.name, "outer");
  EXPECT_EQ(outer.size_bytes, 3u);
  const json rows = json::parse(Written(trace))["traceEvents"];
  ASSERT_EQ(rows.size(), 2u) << "the process and one thread";
  EXPECT_EQ(rows[1]["tid"], outer.row);
  EXPECT_EQ(rows[1]["args"]["name"], "thread 1");
}

}  // namespace chrome_trace_test
}  // namespace pinion
