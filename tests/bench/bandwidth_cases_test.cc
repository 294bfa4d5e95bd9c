// Checks the bandwidth program's results against the emulated accelerator's known model.

#include "pinion/bench/bandwidth_cases.h"

#include <signal.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/bench/bandwidth_reports.h"
#include "pinion/bench/goals.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/programs/command_line.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace bandwidth_cases_test {

using testing::ForwardingDevice;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::StatusIs;

constexpr double kOnePercent = 0.01;
constexpr CopyDirection kH2d = CopyDirection::kHostToDevice;
constexpr CopyDirection kD2h = CopyDirection::kDeviceToHost;

BandwidthOptions SmallOptions(std::vector<std::string> cases = {}) {
  BandwidthOptions options;
  options.max_bytes = 4 * kMiB;
  options.samples = 2;
  options.bytes_per_size = 8 * kMiB;
  options.cases = std::move(cases);
  return options;
}

BenchDevices Emulated(const std::string& preset, int count) {
  DeviceChoice choice;
  choice.device = "emu";
  choice.preset = preset;
  choice.emulated_devices = count;
  choice.emulated_memory_bytes = 128 * kMiB;
  return OpenBenchDevices(choice).value();
}

BandwidthResult RunOn(const BenchDevices& opened, const BandwidthOptions& options) {
  return RunBandwidth(opened.devices, options, [](const std::string&) {}).value();
}

// Replaces the first device by a wrapper around it.
template <typename Wrapper>
std::shared_ptr<Wrapper> Wrap(BenchDevices& opened) {
  auto wrapper = std::make_shared<Wrapper>(opened.devices[0].device);
  opened.devices[0].device = wrapper;
  return wrapper;
}

const Series& Only(const BandwidthResult& result, const std::string& name,
                   const std::string& device = "emu:0") {
  const CaseResult* const of_case = result.Find(name);
  EXPECT_NE(of_case, nullptr) << name;
  EXPECT_THAT(of_case->status, testing::IsOk()) << name;
  const Series* const series = of_case->NearPinned(device);
  EXPECT_NE(series, nullptr) << name;
  return *series;
}

void ExpectCurve(const Series& series, double fixed_us, double gb_per_s) {
  ASSERT_TRUE(series.curve.has_value());
  EXPECT_NEAR(series.curve->fixed_us, fixed_us, kOnePercent * fixed_us);
  EXPECT_NEAR(series.curve->gb_per_s, gb_per_s, kOnePercent * gb_per_s);
}

// --- Results against the model ---

class BandwidthPresetTest : public ::testing::TestWithParam<std::string> {
 protected:
  const LinkModel link_ = FindPreset(GetParam()).value().link;
};

TEST_P(BandwidthPresetTest, SweepsFindTheModelBack) {
  const BandwidthResult result =
      RunOn(Emulated(GetParam(), 1),
            SmallOptions({"host_to_device_memcpy_ce", "device_to_host_memcpy_ce"}));
  ExpectCurve(Only(result, "host_to_device_memcpy_ce"), link_.fixed_us, link_.h2d_gb_per_s);
  ExpectCurve(Only(result, "device_to_host_memcpy_ce"), link_.fixed_us, link_.d2h_gb_per_s);
}

TEST_P(BandwidthPresetTest, BesideTrafficSweepsFindTheDuplexBandwidthBack) {
  const BandwidthResult result =
      RunOn(Emulated(GetParam(), 1), SmallOptions({"host_to_device_bidirectional_memcpy_ce",
                                                   "device_to_host_bidirectional_memcpy_ce"}));
  ExpectCurve(Only(result, "host_to_device_bidirectional_memcpy_ce"), link_.fixed_us,
              link_.h2d_duplex_gb_per_s);
  ExpectCurve(Only(result, "device_to_host_bidirectional_memcpy_ce"), link_.fixed_us,
              link_.d2h_duplex_gb_per_s);
}

TEST_P(BandwidthPresetTest, AllDevicesShareWhatTheHostHas) {
  const int devices = link_.host_gb_per_s > 0 ? 4 : 2;
  const BandwidthResult result = RunOn(
      Emulated(GetParam(), devices), SmallOptions({"host_to_all_memcpy_ce", "all_to_host_memcpy_ce",
                                                   "all_to_host_bidirectional_memcpy_ce"}));
  const double share = link_.host_gb_per_s > 0 ? link_.host_gb_per_s / devices : 1e9;
  const auto expect = [&](const std::string& name, double alone) {
    for (const DeviceResult& device : result.devices) {
      const SizePoint& point = Only(result, name, device.name).points.back();
      const double bandwidth = std::min(share, alone);
      const double us = link_.fixed_us + static_cast<double>(point.size_bytes) / (bandwidth * 1e3);
      EXPECT_NEAR(point.us.median, us, kOnePercent * us) << name << ", " << device.name;
    }
  };
  expect("host_to_all_memcpy_ce", link_.h2d_gb_per_s);
  expect("all_to_host_memcpy_ce", link_.d2h_gb_per_s);
  expect("all_to_host_bidirectional_memcpy_ce", link_.d2h_duplex_gb_per_s);
}

INSTANTIATE_TEST_SUITE_P(Presets, BandwidthPresetTest, ::testing::ValuesIn(PresetNames()),
                         [](const auto& info) { return info.param; });

TEST(BandwidthCasesTest, PageableMemoryReachesWhatItsModelSays) {
  const BandwidthResult result =
      RunOn(Emulated("h100_pcie5", 1), SmallOptions({"host_to_device_memcpy_ce"}));
  const CaseResult& of_case = *result.Find("host_to_device_memcpy_ce");
  ASSERT_EQ(of_case.series.size(), 2u);
  EXPECT_EQ(of_case.series[1].memory, "pageable");
  const double pageable = FindPreset("h100_pcie5").value().link.pageable_gb_per_s;
  EXPECT_NEAR(of_case.series[1].curve.value().gb_per_s, pageable, 0.05 * pageable);
  EXPECT_LT(of_case.series[1].points.back().gb_per_s(), pageable);
}

TEST(BandwidthCasesTest, TheRunMeetsItsOwnGoals) {
  BenchReport report;
  AddBandwidth(RunOn(Emulated("gh200_c2c", 2), SmallOptions()), report);
  EXPECT_THAT(report.Finish(""), testing::IsOk());
  // One goal counts failures. Curve and calibration each have goals for two directions, alone and
  // duplex, on two devices.
  EXPECT_EQ(report.goals().size(), 1u + 2 * 2 * 2 * 2);
}

// A death test has its own process, which receives the signal.
TEST(BandwidthDeathTest, WhatWasMeasuredBeforeASignalIsReportedAndTheRestIsNotMeasured) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        StopBySignal();
        const BenchDevices opened = Emulated("h100_pcie5", 1);
        const auto result = RunBandwidth(
            opened.devices, SmallOptions({"host_to_device_memcpy_ce", "device_to_host_memcpy_ce"}),
            [](const std::string& what) {
              if (what.rfind("device_to_host", 0) == 0) raise(SIGINT);
            });
        for (const std::string& warning : result->warnings) std::cerr << warning << std::endl;
        const bool is_right = !result->Find("host_to_device_memcpy_ce")->series.empty() &&
                              result->Find("device_to_host_memcpy_ce")->series.empty();
        std::_Exit(is_right ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "stopped by a signal");
}

// --- Failing cases ---

class CopyChangingDevice : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  // Called with the number of each copy in `direction`, from 1; may change or drop its pieces.
  std::function<void(int number, std::vector<CopyPiece>& pieces)> change;
  CopyDirection direction = kH2d;

  absl::Status CopyAsync(CopyDirection copy_direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    std::vector<CopyPiece> changed(pieces.begin(), pieces.end());
    if (copy_direction == direction && change != nullptr) change(++number_, changed);
    if (changed.empty()) return absl::OkStatus();
    return ForwardingDevice::CopyAsync(copy_direction, changed, stream);
  }

 private:
  int number_ = 0;
};

void ExpectWrongBytes(CopyDirection direction,
                      std::function<void(int, std::vector<CopyPiece>&)> change) {
  const std::string name =
      direction == kH2d ? "host_to_device_memcpy_ce" : "device_to_host_memcpy_ce";
  BenchDevices opened = Emulated("h100_pcie5", 1);
  const auto device = Wrap<CopyChangingDevice>(opened);
  device->direction = direction;
  device->change = std::move(change);
  const BandwidthResult result = RunOn(opened, SmallOptions({name}));
  const CaseResult& of_case = *result.Find(name);
  EXPECT_THAT(of_case.status, StatusIs(absl::StatusCode::kDataLoss, HasSubstr("did not arrive")))
      << CopyDirectionName(direction);
  EXPECT_THAT(of_case.series, IsEmpty());
  BenchReport report;
  AddBandwidth(result, report);
  EXPECT_THAT(report.Finish(""), StatusIs(absl::StatusCode::kOutOfRange));
}

TEST(BandwidthCasesTest, ACopyThatIsDroppedMakesTheCaseAnError) {
  for (const CopyDirection direction : {kH2d, kD2h}) {
    bool dropped = false;
    ExpectWrongBytes(direction, [&dropped](int, std::vector<CopyPiece>& pieces) {
      // Only measured copies have this size, not gates, traffic or verification.
      if (!dropped && pieces[0].size_bytes == 16 * kKiB) {
        pieces.clear();
        dropped = true;
      }
    });
    EXPECT_TRUE(dropped);
  }
}

TEST(BandwidthCasesTest, ACopyThatLosesItsLastByteMakesTheCaseAnError) {
  for (const CopyDirection direction : {kH2d, kD2h}) {
    bool changed = false;
    ExpectWrongBytes(direction, [&changed](int, std::vector<CopyPiece>& pieces) {
      if (!changed && pieces[0].size_bytes == kMiB) {
        --pieces[0].size_bytes;
        changed = true;
      }
    });
    EXPECT_TRUE(changed);
  }
}

TEST(BandwidthCasesTest, ACopyToTheWrongPlaceMakesTheCaseAnError) {
  bool changed = false;
  ExpectWrongBytes(kH2d, [&changed](int, std::vector<CopyPiece>& pieces) {
    if (!changed && pieces[0].size_bytes == 64 * kKiB) {
      pieces[0].src = static_cast<const char*>(pieces[0].src) + 64 * kKiB;
      changed = true;
    }
  });
}

// Each submission takes as much host time as dozens of small copies.
class SlowlySubmittingDevice : public ForwardingDevice {
 public:
  explicit SlowlySubmittingDevice(std::shared_ptr<Device> device)
      : ForwardingDevice(device), event_(device->CreateEvent().value()) {}

  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    for (int i = 0; i < 30; ++i) (void)ForwardingDevice::QueryEvent(event_);  // 1 us each
    return ForwardingDevice::CopyAsync(direction, pieces, stream);
  }

 private:
  const EventHandle event_;
};

TEST(BandwidthCasesTest, SlowSubmissionChangesNoResult) {
  const std::vector<std::string> cases = {"host_to_device_memcpy_ce",
                                          "host_to_device_bidirectional_memcpy_ce"};
  BenchDevices slow = Emulated("h100_pcie5", 1);
  slow.devices[0].memory.resize(1);  // pageable copies include host time
  BenchDevices fast = Emulated("h100_pcie5", 1);
  fast.devices[0].memory.resize(1);
  Wrap<SlowlySubmittingDevice>(slow);
  const BandwidthResult with = RunOn(slow, SmallOptions(cases));
  const BandwidthResult without = RunOn(fast, SmallOptions(cases));
  for (const std::string& name : cases) {
    const Series& slowly = Only(with, name);
    const Series& quickly = Only(without, name);
    ASSERT_EQ(slowly.points.size(), quickly.points.size());
    for (size_t i = 0; i < slowly.points.size(); ++i) {
      EXPECT_NEAR(slowly.points[i].us.median, quickly.points[i].us.median,
                  kOnePercent * quickly.points[i].us.median)
          << name << ", " << slowly.points[i].size_bytes << " bytes";
    }
  }
}

TEST(BandwidthCasesTest, ADeviceThatFailsMakesErrorsAndNoCrash) {
  BenchDevices opened = Emulated("h100_pcie5", 1);
  const auto device = Wrap<ForwardingDevice>(opened);
  device->FailCalls([](const std::string& call, uint64_t) {
    return call == "CopyAsync" ? absl::UnavailableError("injected") : absl::OkStatus();
  });
  const BandwidthResult result = RunOn(opened, SmallOptions());
  for (const CaseResult& of_case : result.cases) {
    EXPECT_THAT(of_case.status, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("injected")))
        << of_case.of.name;
  }
  EXPECT_THAT(result.warnings, ::testing::Contains(HasSubstr("could not be calibrated")));
}

TEST(BandwidthCasesTest, WhereMemoryIsShortTheSweepEndsEarlierAndSaysSo) {
  DeviceChoice choice;
  choice.device = "emu:0";
  choice.emulated_devices = 1;
  choice.emulated_memory_bytes = 64 * kMiB;
  BandwidthOptions options = SmallOptions({"host_to_device_memcpy_ce"});
  options.max_bytes = 64 * kMiB;
  const BandwidthResult result = RunOn(OpenBenchDevices(choice).value(), options);
  EXPECT_EQ(Only(result, "host_to_device_memcpy_ce").points.back().size_bytes, 16 * kMiB);
  EXPECT_THAT(result.warnings, ::testing::Contains(HasSubstr("no memory for copies of more")));
}

TEST(BandwidthCasesTest, SizesAreTheOptionsEndsAndPowersOfFour) {
  BandwidthOptions options;
  options.min_bytes = 4 * kKiB;
  options.max_bytes = 100 * kKiB;
  EXPECT_THAT(SweepSizes(options),
              ::testing::ElementsAre(4 * kKiB, 16 * kKiB, 64 * kKiB, 100 * kKiB));
}

TEST(BandwidthCasesTest, BadOptionsAreNamed) {
  BandwidthOptions options;
  options.cases = {"host_to_device"};
  EXPECT_THAT(options.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("host_to_device_memcpy_ce")));
  options = {};
  options.min_bytes = 2 * kGiB;
  EXPECT_THAT(options.Validate(), StatusIs(absl::StatusCode::kInvalidArgument));
  options = {};
  options.samples = 0;
  EXPECT_THAT(options.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("samples is 0")));
}

TEST(BenchDevicesTest, ANameThatIsNoDeviceIsRefused) {
  for (const char* const name : {"gpu", "emu:x", "emu:-1", "cuda:"}) {
    DeviceChoice choice;
    choice.device = name;
    EXPECT_THAT(OpenBenchDevices(choice), ::testing::Not(testing::IsOk())) << name;
  }
  DeviceChoice choice;
  choice.device = "emu:2";
  EXPECT_THAT(OpenBenchDevices(choice),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no device emu:2")));
}

}  // namespace bandwidth_cases_test
}  // namespace pinion
