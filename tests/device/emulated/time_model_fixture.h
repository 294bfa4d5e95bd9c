// A time model with round numbers, and helpers for its tests.

#ifndef PINION_TESTS_DEVICE_EMULATED_TIME_MODEL_FIXTURE_H_
#define PINION_TESTS_DEVICE_EMULATED_TIME_MODEL_FIXTURE_H_

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/deferred_effects.h"
#include "pinion/device/emulated/engines.h"
#include "pinion/device/emulated/time_model.h"

namespace pinion {

using Outcome = TimeModel::Outcome;

inline constexpr CopyDirection kIn = CopyDirection::kHostToDevice;
inline constexpr CopyDirection kOut = CopyDirection::kDeviceToHost;
inline constexpr double kExact = 1e-9;

// 10 MB take 1 ms in and 2 ms out, and twice as long while both directions are busy.
inline LinkModel RoundLink() {
  LinkModel link;
  link.h2d_gb_per_s = 10;
  link.d2h_gb_per_s = 5;
  link.h2d_duplex_gb_per_s = 5;
  link.d2h_duplex_gb_per_s = 2.5;
  return link;
}
inline constexpr uint64_t kTenMb = 10'000'000;

inline CopyCost Cost(CopyDirection direction, uint64_t size_bytes, int device = 0,
                     double latency_ms = 0) {
  CopyCost cost;
  cost.device = device;
  cost.direction = direction;
  cost.size_bytes = size_bytes;
  cost.latency_ms = latency_ms;
  return cost;
}

class TimeModelTest : public ::testing::Test {
 protected:
  TimeModelTest() : TimeModelTest(RoundLink(), 1) {}
  TimeModelTest(const LinkModel& link, int device_count) : time_(link, device_count) {
    time_.Observe([this](const TimedWork& work) { done_.push_back(work); }, nullptr);
    compute_ = time_.AddStream(0, "emu:0/compute");
    in_ = time_.AddStream(0, "emu:0/in");
    out_ = time_.AddStream(0, "emu:0/out");
  }

  StreamPoint Kernel(int stream, double ms) { return time_.AddKernel(stream, "kernel", 1, ms); }
  StreamPoint Copy(int stream, const CopyCost& cost) {
    return time_.AddCopy(stream, "copy", 2, cost);
  }
  void RunToEnd(StreamPoint point) { ASSERT_EQ(time_.RunUntil(point, kForever), Outcome::kDone); }
  void ExpectEnd(StreamPoint point, double ms) {
    RunToEnd(point);
    EXPECT_NEAR(time_.now_ms(), ms, kExact);
  }

  TimeModel time_;
  std::vector<TimedWork> done_;
  int compute_, in_, out_;
};

class TwoDevicesTest : public TimeModelTest {
 protected:
  static LinkModel Link() {
    LinkModel link = RoundLink();
    link.host_gb_per_s = 12;
    return link;
  }
  TwoDevicesTest() : TimeModelTest(Link(), 2) { in1_ = time_.AddStream(1, "emu:1/in"); }
  int in1_;
};

}  // namespace pinion

#endif  // PINION_TESTS_DEVICE_EMULATED_TIME_MODEL_FIXTURE_H_
