// Parses the text and both JSON forms of a bandwidth run.

#include "pinion/bench/bandwidth_reports.h"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/bench/goals.h"
#include "pinion/device/device.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Series SweepOf(const LinkCurve& curve, int column, const std::string& memory) {
  Series series;
  series.column = column;
  series.device = column == 0 ? "cuda:0" : "cuda:1";
  series.memory = memory;
  series.numa_node = 0;
  for (const uint64_t size_bytes : {4 * kKiB, kMiB, 256 * kMiB}) {
    SizePoint point;
    point.size_bytes = size_bytes;
    point.copies = 4;
    const double us = curve.CopyUs(size_bytes);
    point.us = {.samples = 10, .median = us, .p5 = 0.9 * us, .p95 = 1.1 * us, .cv = 0.05};
    series.points.push_back(point);
  }
  series.curve = curve;
  return series;
}

// The second device has results for pageable memory in one case only.
BandwidthResult TwoDevices() {
  BandwidthResult result;
  for (const char* const name : {"cuda:0", "cuda:1"}) {
    DeviceResult device;
    device.name = name;
    device.info.model = "NVIDIA H100";
    device.info.link_name = "PCIe 5 x16";
    device.info.rated_gb_per_s = 63;
    result.devices.push_back(device);
  }
  result.cuda_runtime_version = 13000;
  result.driver_version = "580.65.06";

  CaseResult passed;
  passed.name = "host_to_device_memcpy_ce";
  passed.description = "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)";
  passed.series.push_back(SweepOf({.fixed_us = 3, .gb_per_s = 55.5}, 0, "pinned"));
  passed.series.push_back(SweepOf({.fixed_us = 9, .gb_per_s = 11}, 0, "pageable"));
  result.cases.push_back(passed);

  CaseResult waived;
  waived.name = "host_device_latency_sm";
  waived.status = CaseStatus::kWaived;
  waived.reason = "no probe";
  result.cases.push_back(waived);

  CaseResult error;
  error.name = "device_to_host_memcpy_ce";
  error.status = CaseStatus::kError;
  error.reason = "byte 7 did not arrive as it was sent";
  result.cases.push_back(error);
  return result;
}

TEST(NvbandwidthJsonTest, HasNvbandwidthsFields) {
  const nlohmann::json json = nlohmann::json::parse(NvbandwidthJson(TwoDevices()).dump());
  const nlohmann::json& root = json.at("nvbandwidth");
  EXPECT_TRUE(root.at("version").is_string());
  EXPECT_TRUE(root.at("git_version").is_string());
  EXPECT_EQ(root.at("CUDA Runtime Version"), 13000);
  EXPECT_EQ(root.at("Driver Version"), "580.65.06");
  EXPECT_EQ(root.at("GPU Device list"), nlohmann::json({"0: NVIDIA H100", "1: NVIDIA H100"}));
  EXPECT_FALSE(root.contains("warning"));
  ASSERT_EQ(root.at("testcases").size(), 3u);
}

TEST(NvbandwidthJsonTest, MatrixEntriesAreStringsAndWhatIsMissingIsNa) {
  const nlohmann::json testcase = NvbandwidthJson(TwoDevices())["nvbandwidth"]["testcases"][0];
  EXPECT_EQ(testcase.at("name"), "host_to_device_memcpy_ce");
  EXPECT_EQ(testcase.at("status"), "Passed");
  EXPECT_EQ(testcase.at("bandwidth_description"),
            "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)");
  ASSERT_EQ(testcase.at("bandwidth_matrix").size(), 1u);
  const nlohmann::json& row = testcase.at("bandwidth_matrix")[0];
  ASSERT_EQ(row.size(), 2u);
  // The matrix shows the largest size in the device's first kind of memory.
  EXPECT_NEAR(std::stod(row[0].get<std::string>()), 55.47, 0.01);
  EXPECT_EQ(row[1], "N/A");
  for (const char* const key : {"sum", "min", "max", "average"}) {
    EXPECT_NEAR(testcase.at(key).get<double>(), 55.47, 0.01) << key;
  }
}

TEST(NvbandwidthJsonTest, WhatDidNotPassHasAStatusAndNoValues) {
  const nlohmann::json testcases = NvbandwidthJson(TwoDevices())["nvbandwidth"]["testcases"];
  EXPECT_EQ(testcases[1].at("status"), "Waived");
  EXPECT_FALSE(testcases[1].contains("bandwidth_matrix"));
  EXPECT_EQ(testcases[2].at("status"), "Error");
  EXPECT_EQ(testcases[2].at("error"), "byte 7 did not arrive as it was sent");
  EXPECT_FALSE(testcases[2].contains("sum"));
}

TEST(NvbandwidthJsonTest, ModelledValuesAreMarked) {
  BandwidthResult result = TwoDevices();
  result.modelled = true;
  result.warnings = {"a note"};
  EXPECT_EQ(NvbandwidthJson(result)["nvbandwidth"]["warning"],
            "a note; all values are modelled, none was measured");
}

TEST(BandwidthReportTest, RowsHaveEveryPointAndFit) {
  const nlohmann::json json = nlohmann::json::parse(MakeReport(TwoDevices()).ToJson().dump());
  int points = 0;
  int fits = 0;
  for (const nlohmann::json& row : json.at("rows")) {
    if (row.at("row") == "point") {
      ++points;
      EXPECT_GT(row.at("gb_per_s"), 0);
      EXPECT_LT(row.at("us_per_copy_p5"), row.at("us_per_copy_p95"));
      EXPECT_EQ(row.at("modelled"), false);
    }
    if (row.at("row") == "fit") ++fits;
  }
  EXPECT_EQ(points, 6);
  EXPECT_EQ(fits, 2);
}

TEST(BandwidthReportTest, AFailedCaseMissesAGoal) {
  const BenchReport report = MakeReport(TwoDevices());
  ASSERT_FALSE(report.goals().empty());
  EXPECT_EQ(report.goals()[0].value, 1);
  EXPECT_FALSE(report.goals()[0].met());
}

TEST(BandwidthReportTest, ACalibrationThatDisagreesMissesAGoal) {
  BandwidthResult result = TwoDevices();
  result.devices.resize(1);
  result.cases.resize(1);
  LinkCalibration link;
  link.h2d = {.fixed_us = 3, .gb_per_s = 55};
  result.devices[0].calibration = link;
  EXPECT_THAT(MakeReport(result).Finish(""), testing::IsOk());
  result.devices[0].calibration->h2d.gb_per_s = 50;
  EXPECT_THAT(MakeReport(result).Finish(""), testing::StatusIs(absl::StatusCode::kOutOfRange));
}

TEST(BandwidthTextTest, SaysWhichShareOfTheRatedSpeedIsReached) {
  const std::string text = BandwidthText(TwoDevices());
  EXPECT_THAT(text, HasSubstr("H2D reaches 55.5 GB/s, 88 % of the 63 GB/s that PCIe 5 x16"));
  EXPECT_THAT(text, HasSubstr("SUM host_to_device_memcpy_ce 55.47"));
  EXPECT_THAT(text, HasSubstr("host_device_latency_sm: Waived: no probe"));
  EXPECT_THAT(text, HasSubstr("N/A"));
  EXPECT_THAT(text, Not(HasSubstr("modelled")));
}

TEST(BandwidthTextTest, ModelledTimesAreLabelled) {
  BandwidthResult result = TwoDevices();
  result.modelled = true;
  EXPECT_THAT(BandwidthText(result), HasSubstr("nothing here was measured on hardware"));
}

}  // namespace
}  // namespace pinion
