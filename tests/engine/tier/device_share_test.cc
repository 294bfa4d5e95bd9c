// Streamed weights and plans with a memory target share one device's memory.

#include "pinion/engine/tier/device_share.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "gtest/gtest.h"
#include "pinion/engine/schedule/reservation.h"

namespace pinion {
namespace {

TEST(DeviceShare, WhatIsStreamedCountsForItsModelAndForTheDeviceUntilItIsGone) {
  const auto share = std::make_shared<DeviceShare>();
  const auto one = std::make_shared<StreamedModel>();
  const auto other = std::make_shared<StreamedModel>();
  const StreamedBytes first(share, one, 100);
  {
    StreamedBytes second(share, other, 30);
    EXPECT_EQ(share->allocated_bytes(), 0u) << "they may be refused";
    second.CountAllocation();
    EXPECT_EQ(share->streamed_bytes(), 130u);
    EXPECT_EQ(one->current_bytes, 100u);
    EXPECT_EQ(other->current_bytes, 30u);
  }
  EXPECT_EQ(share->streamed_bytes(), 100u);
  EXPECT_EQ(other->current_bytes, 0u);
  EXPECT_EQ(share->allocated_bytes(), 30u) << "what was freed counts on here";
}

TEST(DeviceShare, BytesThatAreMovedCountOnce) {
  const auto share = std::make_shared<DeviceShare>();
  const auto model = std::make_shared<StreamedModel>();
  StreamedBytes here(share, model, 100);
  StreamedBytes there(std::move(here));
  EXPECT_EQ(share->streamed_bytes(), 100u);
  StreamedBytes another(share, model, 7);
  another.CountAllocation();
  another = std::move(there);
  { const StreamedBytes gone = std::move(another); }
  { const StreamedBytes gone = std::move(there); }
  EXPECT_EQ(share->streamed_bytes(), 0u);
  EXPECT_EQ(model->current_bytes, 0u);
  EXPECT_EQ(share->allocated_bytes(), 7u);
}

TEST(DeviceShare, WhatSeveralModelsWantAddsUp) {
  DeviceShare share;
  share.Want({.least_bytes = 10, .enough_bytes = 25});
  share.Want({.least_bytes = 4, .enough_bytes = 8});
  EXPECT_EQ(share.wanted().least_bytes, 14u);
  EXPECT_EQ(share.wanted().enough_bytes, 33u);
  share.WantNoMore({.least_bytes = 10, .enough_bytes = 25});
  EXPECT_EQ(share.wanted().least_bytes, 4u);
  EXPECT_EQ(share.wanted().enough_bytes, 8u);
}

TEST(DeviceShare, APeakBoundHoldsUntilTheNextOne) {
  DeviceShare share;
  EXPECT_FALSE(share.peak_bound().has_value());
  for (const bool moves : {true, false}) {
    share.SetPeakBound(PeakBound{.most_bytes = uint64_t{1} << 40, .moves = moves});
    ASSERT_TRUE(share.peak_bound().has_value());
    EXPECT_EQ(share.peak_bound()->most_bytes, uint64_t{1} << 40);
    EXPECT_EQ(share.peak_bound()->moves, moves);
  }
  share.SetPeakBound(PeakBound{});
  EXPECT_TRUE(share.peak_bound().has_value()) << "others take nothing";
  share.SetPeakBound(std::nullopt);
  EXPECT_FALSE(share.peak_bound().has_value());
}

// Weights of a model that are evicted unless they are in use.
struct Idle final : EvictableWeights {
  Idle(const std::shared_ptr<DeviceShare>& share, uint64_t size_bytes)
      : bytes(share, std::make_shared<StreamedModel>(), size_bytes) {}
  void EvictIdle(bool unless_in_use) override {
    ++asked;
    if (is_in_use && unless_in_use) return;
    const StreamedBytes evicted = std::move(bytes);
  }
  StreamedBytes bytes;
  bool is_in_use = false;
  int asked = 0;
};

TEST(DeviceShare, IdleWeightsAreEvictedOnlyWhileThereIsMore) {
  const auto share = std::make_shared<DeviceShare>();
  const auto first = std::make_shared<Idle>(share, 10);
  const auto second = std::make_shared<Idle>(share, 20);
  const auto third = std::make_shared<Idle>(share, 40);
  for (const auto& weights : {first, second, third}) share->Register(weights);
  share->EvictIdleWeights(/*most_bytes=*/70);
  EXPECT_EQ(first->asked, 0);
  share->EvictIdleWeights(/*most_bytes=*/69, /*unless_in_use=*/false, /*except=*/first.get());
  EXPECT_EQ(share->streamed_bytes(), 50u);
  EXPECT_EQ(first->asked + third->asked, 0);
  third->is_in_use = true;
  share->EvictIdleWeights(/*most_bytes=*/0, /*unless_in_use=*/true);
  EXPECT_EQ(share->streamed_bytes(), 40u);
  share->EvictIdleWeights(/*most_bytes=*/0);
  EXPECT_EQ(share->streamed_bytes(), 0u);
}

TEST(DeviceShare, WeightsThatWereUsedLastAreKnownWhileThereIsAPeakBound) {
  const auto share = std::make_shared<DeviceShare>();
  const Idle weights(share, 10);
  share->OnUse(&weights);
  EXPECT_EQ(share->used_last(), nullptr);
  share->SetPeakBound(PeakBound{});
  EXPECT_EQ(share->used_last(), nullptr) << "their window was another one";
  share->OnUse(&weights);
  EXPECT_EQ(share->used_last(), &weights);
  share->SetPeakBound(std::nullopt);
  EXPECT_EQ(share->used_last(), nullptr);
}

TEST(DeviceShare, WeightsThatAreGoneAreNotAsked) {
  const auto share = std::make_shared<DeviceShare>();
  share->Register(std::make_shared<Idle>(share, 10));
  const auto stays = std::make_shared<Idle>(share, 20);
  share->Register(stays);
  share->EvictIdleWeights(/*most_bytes=*/0);
  EXPECT_EQ(stays->asked, 1);
}

}  // namespace
}  // namespace pinion
