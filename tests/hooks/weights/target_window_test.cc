// The bytes that a memory target leaves for streamed weights, computed from the allocator's figures
// and from the device's other tenants; and the message for a device that had more.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>

#include "gtest/gtest.h"
#include "pinion/engine/schedule/reservation.h"
#include "pinion/engine/schedule/weight_prefetcher.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/weights/device_weights.h"

namespace pinion::testing {
namespace {

constexpr uint64_t kTarget = 1000;

// A device with a model whose weights are streamed to it, and its allocator, of which others take
// too.
class Device {
 public:
  Device() : window_(kTarget, share_, weights_) {}

  // The window at a use of that unit.
  uint64_t Use(uint32_t unit) {
    window_.AtUse({.object = unit}, allocator_);
    return window_.OwnBytes();
  }
  // Of a place that is known, with nothing that follows: what others have now.
  uint64_t UseKnown(uint32_t unit) {
    Use(unit);
    Use(unit + 1);
    return Use(unit);
  }

  void Allocate(int64_t size_bytes) {
    allocator_.current += size_bytes;
    allocator_.allocated += size_bytes;
    allocator_.peak = std::max(allocator_.peak, allocator_.current);
  }
  void Free(int64_t size_bytes) { allocator_.current -= size_bytes; }
  void ResetPeak() { allocator_.peak = allocator_.current; }

  // Weights of a model on their way: promised to the allocator, which has not heard of them.
  StreamedBytes Foretell(const std::shared_ptr<StreamedModel>& model, uint64_t size_bytes) {
    return StreamedBytes(share_, model, size_bytes);
  }
  StreamedBytes Bring(const std::shared_ptr<StreamedModel>& model, uint64_t size_bytes) {
    StreamedBytes bytes = Foretell(model, size_bytes);
    Allocate(static_cast<int64_t>(size_bytes));
    bytes.CountAllocation();
    return bytes;
  }

  DeviceShare& share() { return *share_; }
  const std::shared_ptr<StreamedModel>& weights() const { return weights_; }
  TargetWindow& window() { return window_; }

 private:
  const std::shared_ptr<DeviceShare> share_ = std::make_shared<DeviceShare>();
  const std::shared_ptr<StreamedModel> weights_ = std::make_shared<StreamedModel>();
  AllocatorBytes allocator_;
  TargetWindow window_;
};

TEST(TargetWindow, IsTheTargetLessWhatOthersHaveAndWillTake) {
  Device device;
  device.Allocate(100);
  EXPECT_EQ(device.Use(0), 0u) << "nobody knows what follows";
  device.Allocate(70);
  device.Free(50);
  device.Use(1);
  EXPECT_EQ(device.Use(0), kTarget - 120 - 70);
}

TEST(TargetWindow, WhatItsOwnWeightsHaveAndAllocateIsNoneOfOthers) {
  Device device;
  device.Allocate(100);
  device.Use(0);
  const StreamedBytes here = device.Bring(device.weights(), 300);
  { const StreamedBytes gone = device.Bring(device.weights(), 200); }
  device.Free(200);
  device.Use(1);
  EXPECT_EQ(device.Use(0), kTarget - 100) << "of 300 that are there, and 500 that came behind it";
}

TEST(TargetWindow, WeightsThatTheAllocatorHasNotHeardOfTakeNothingFromOthers) {
  Device device;
  device.Allocate(100);
  const StreamedBytes coming = device.Foretell(device.weights(), 300);
  EXPECT_EQ(device.UseKnown(0), kTarget) << "and others have not less than nothing";
}

TEST(TargetWindow, AnotherModelsWeightsAreOthers) {
  Device device;
  const auto other = std::make_shared<StreamedModel>();
  device.Allocate(100);
  const StreamedBytes own = device.Bring(device.weights(), 300);
  const StreamedBytes others = device.Bring(other, 50);
  EXPECT_EQ(device.UseKnown(0), kTarget - 100 - 50);
  EXPECT_EQ(device.window().AtUse({.object = 1}, AllocatorBytes{.current = 450}), kTarget - 100)
      << "for the weights of all models";
}

TEST(TargetWindow, WhatAnotherModelsWeightsAllocateIsNotPredicted) {
  Device device;
  const auto other = std::make_shared<StreamedModel>();
  device.Allocate(100);
  device.Use(0);
  { const StreamedBytes gone = device.Bring(other, 200); }
  device.Free(200);
  device.Use(1);
  EXPECT_EQ(device.Use(0), kTarget - 100) << "they make room for themselves";
}

TEST(TargetWindow, ShrinksAtOnceWithWhatAnotherModelFetches) {
  Device device;
  const auto other = std::make_shared<StreamedModel>();
  ASSERT_EQ(device.UseKnown(0), kTarget);
  const StreamedBytes others = device.Bring(other, 300);
  EXPECT_EQ(device.window().OwnBytes(), kTarget - 300);
}

TEST(TargetWindow, BesideAPeakBoundIsWhatAnotherModelHasButNotItsOwn) {
  Device device;
  const auto other = std::make_shared<StreamedModel>();
  device.Allocate(100);
  device.share().SetPeakBound(PeakBound{.most_bytes = 400, .moves = true});
  const StreamedBytes own = device.Bring(device.weights(), 300);
  EXPECT_EQ(device.UseKnown(0), kTarget - 400);
  {
    const StreamedBytes others = device.Bring(other, 50);
    EXPECT_EQ(device.UseKnown(0), kTarget - 400 - 50);
    device.Free(50);
  }
  EXPECT_EQ(device.UseKnown(0), kTarget - 400);
  device.share().SetPeakBound(std::nullopt);
  EXPECT_EQ(device.UseKnown(4), kTarget - 100) << "the step is over";
}

// A use after which the device has had so many bytes for a while.
void UseWithPeak(Device& device, uint32_t unit, int64_t size_bytes) {
  device.Use(unit);
  device.Allocate(size_bytes);
  device.Free(size_bytes);
}

TEST(TargetWindow, MoreThanTheTargetIsToldOnceWithTheUnitAndTheMostIsKept) {
  Device device;
  UseWithPeak(device, 3, 1000);
  UseWithPeak(device, 4, 1200);
  EXPECT_FALSE(device.window().TakeFirstExcess().has_value()) << "as much is not more";
  EXPECT_EQ(device.window().excess_device_bytes(), 0u);
  device.Use(5);
  const std::optional<TargetWindow::Excess> excess = device.window().TakeFirstExcess();
  ASSERT_TRUE(excess.has_value());
  EXPECT_EQ(excess->device_bytes, 1200u);
  EXPECT_EQ(excess->target_bytes, kTarget);
  EXPECT_EQ(excess->unit, 4u);
  UseWithPeak(device, 6, 1500);
  device.Use(7);
  EXPECT_FALSE(device.window().TakeFirstExcess().has_value());
  EXPECT_EQ(device.window().excess_device_bytes(), 1500u);
}

TEST(TargetWindow, WhatTheDeviceHadBeforeTheFirstUseIsNotCounted) {
  Device device;
  device.Allocate(5000);
  device.Free(4900);
  device.Use(0);
  device.Use(1);
  EXPECT_FALSE(device.window().TakeFirstExcess().has_value());
  EXPECT_EQ(device.window().excess_device_bytes(), 0u);
}

TEST(TargetWindow, WhereThePeakIsResetItIsCountedFromThereOnAndTheMostIsKept) {
  Device device;
  UseWithPeak(device, 0, 1500);
  device.Use(1);
  ASSERT_TRUE(device.window().TakeFirstExcess().has_value());
  device.ResetPeak();
  device.Use(2);
  UseWithPeak(device, 3, 1100);
  device.Use(4);
  EXPECT_EQ(device.window().excess_device_bytes(), 1500u) << "1100 is less";
  UseWithPeak(device, 5, 1600);
  device.Use(6);
  EXPECT_EQ(device.window().excess_device_bytes(), 1600u);
}

TEST(TargetWindow, AnExcessBelowAPeakThatWasResetIsToldToo) {
  Device device;
  device.Allocate(5000);  // the whole model, before it was attached
  device.Free(5000);
  device.Use(0);
  device.ResetPeak();
  UseWithPeak(device, 1, 1100);
  device.Use(2);
  const std::optional<TargetWindow::Excess> excess = device.window().TakeFirstExcess();
  ASSERT_TRUE(excess.has_value());
  EXPECT_EQ(excess->device_bytes, 1100u);
  EXPECT_EQ(excess->unit, 1u);
}

}  // namespace
}  // namespace pinion::testing
