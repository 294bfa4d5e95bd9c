// Parses the JSON of a bandwidth run.

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

using ::testing::ElementsAre;

Series SweepOf(const LinkCurve& curve, const std::string& memory) {
  Series series = {.device = "cuda:0", .memory = memory, .numa_node = 0, .curve = curve};
  for (const uint64_t size_bytes : {4 * kKiB, kMiB, 256 * kMiB}) {
    SizePoint point;
    point.size_bytes = size_bytes;
    point.copies = 4;
    const double us = curve.CopyUs(size_bytes);
    point.us = {.samples = 10, .median = us, .p5 = 0.9 * us, .p95 = 1.1 * us, .cv = 0.05};
    series.points.push_back(point);
  }
  return series;
}

// A case with results of the first device in two kinds of memory, and a case that failed.
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
  result.cases.push_back({.of = {"host_to_device_memcpy_ce", CopyDirection::kHostToDevice},
                          .series = {SweepOf({.fixed_us = 3, .gb_per_s = 55.5}, "pinned"),
                                     SweepOf({.fixed_us = 9, .gb_per_s = 11}, "pageable")}});
  result.cases.push_back({.of = {"device_to_host_memcpy_ce", CopyDirection::kDeviceToHost},
                          .status = absl::DataLossError("byte 7 did not arrive as it was sent")});
  return result;
}

BenchReport ReportOf(const BandwidthResult& result) {
  BenchReport report;
  AddBandwidth(result, report);
  return report;
}

TEST(BandwidthReportTest, RowsHaveEveryPointAndFit) {
  const nlohmann::json json = nlohmann::json::parse(ReportOf(TwoDevices()).ToJson().dump());
  int points = 0;
  std::vector<double> of_rated;
  for (const nlohmann::json& row : json.at("rows")) {
    if (row.at("row") == "point") {
      ++points;
      EXPECT_GT(row.at("gb_per_s"), 0);
      EXPECT_LT(row.at("us_per_copy_p5"), row.at("us_per_copy_p95"));
      EXPECT_EQ(row.at("modelled"), false);
    }
    if (row.at("row") == "fit") of_rated.push_back(row.at("of_rated"));
    if (row.at("row") == "error") {
      EXPECT_EQ(row.at("error"), "byte 7 did not arrive as it was sent");
    }
  }
  EXPECT_EQ(points, 6);
  EXPECT_THAT(of_rated, ElementsAre(55.5 / 63, 11.0 / 63));
}

TEST(BandwidthReportTest, AFailedCaseMissesAGoal) {
  const BenchReport report = ReportOf(TwoDevices());
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
  EXPECT_THAT(ReportOf(result).Finish(""), testing::IsOk());
  result.devices[0].calibration->h2d.gb_per_s = 50;
  EXPECT_THAT(ReportOf(result).Finish(""), testing::StatusIs(absl::StatusCode::kOutOfRange));
}

}  // namespace
}  // namespace pinion
