// Checks the peak that a planned step peak_bounds to streamed weights in the same memory target. It
// includes tensors that should be offloaded but stay because the program references them.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/schedule/reservation.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/tier/torch_tier.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace offload_peak_bound_test {

constexpr int64_t kTensorBytes = 256 * kKiB;
constexpr int64_t kViewBytes = 16 * kKiB;  // small enough to be gathered
constexpr size_t kNodes = 6;

using Tensors = std::vector<at::Tensor>;

class OffloadPeakBound : public ::testing::Test {
 protected:
  // Makes the tensors that node `i` saves and that the program may reference.
  using Make = std::function<Tensors(size_t i)>;

  Tensors Activations(size_t i) {
    return {Activation(carrier_, {kTensorBytes / 4}, static_cast<int>(i))};
  }
  // Stays resident while the program references it, since a copy would free nothing.
  Tensors Leaves() { return {at::ones({kTensorBytes / 4}, at::TensorOptions(world_.device()))}; }
  // Views of much larger storages: their parcel has gathered bytes and references no storage.
  Tensors SmallViews(size_t i) {
    Tensors views;
    for (int n = 0; n < 2; ++n) {
      views.push_back(Activation(carrier_, {kTensorBytes / 4}, static_cast<int>(2 * i) + n)
                          .narrow(0, 0, kViewBytes / 4));
    }
    return views;
  }

  // The state after each pack of one step.
  struct Packs {
    std::vector<std::optional<PeakBound>> peak_bounds;
    std::vector<uint64_t> evicted_bytes;
    size_t FirstEviction() const {
      const auto more = [this](uint64_t bytes) { return bytes > evicted_bytes.front(); };
      return static_cast<size_t>(std::find_if(evicted_bytes.begin(), evicted_bytes.end(), more) -
                                 evicted_bytes.begin());
    }
  };
  // If `holds`, the program references the first node's first tensor until the end of the step.
  Packs RunStep(const std::shared_ptr<OffloadSession>& session, const Make& make, bool holds) {
    Packs packs;
    at::Tensor held;
    at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
      for (size_t i = 0; i < kNodes; ++i) {
        Tensors saved = make(i);
        if (i == 0 && holds) held = saved.front();
        y = Probe(y, saved, Read);
        saved.clear();
        packs.peak_bounds.push_back(share_->peak_bound());
        packs.evicted_bytes.push_back(session->GetStats().evicted_bytes);
      }
    });
    y.backward();
    y.reset();
    EXPECT_THAT(world_.Synchronize(), IsOk());
    EXPECT_TRUE(Soon([this] { return !share_->peak_bound().has_value(); })) << "no step runs";
    return packs;
  }

  // Returns a session whose plan evicts all tensors of the first node.
  std::shared_ptr<OffloadSession> Planned(const Make& make) {
    world_.ResetPeak();
    RunStep(world_.NewSession(WithTarget(1)), make, /*holds=*/false);
    const auto session = world_.NewSession(WithTarget(world_.peak_device_bytes() + kViewBytes / 2));
    for (int step = 0; step < 5; ++step) RunStep(session, make, /*holds=*/false);
    return session;
  }

  // Expects `held_bytes` more in the peak_bound from the pack of the plan's first eviction on.
  void ExpectBoundRaisedFromThePackOn(const Make& make, uint64_t held_bytes) {
    const std::shared_ptr<OffloadSession> session = Planned(make);
    const Packs usual = RunStep(session, make, /*holds=*/false);
    const size_t first = usual.FirstEviction();
    ASSERT_GT(first, 0u);
    ASSERT_LT(first, kNodes) << "nothing was evicted";
    const Packs packs = RunStep(session, make, /*holds=*/true);
    for (size_t i = 0; i < kNodes; ++i) {
      SCOPED_TRACE(i);
      ASSERT_TRUE(usual.peak_bounds[i].has_value());
      ASSERT_TRUE(packs.peak_bounds[i].has_value());
      EXPECT_EQ(usual.peak_bounds[i]->most_bytes, usual.peak_bounds[0]->most_bytes);
      EXPECT_EQ(packs.peak_bounds[i]->most_bytes,
                usual.peak_bounds[i]->most_bytes + (i < first ? 0 : held_bytes));
    }
  }

  EmuWorld world_;
  at::Tensor carrier_ = NewCarrier(world_);
  const std::shared_ptr<DeviceShare> share_ =
      TorchHostTier(SmallTier(), world_.backend(), world_.device().type())
          .value()
          ->ForDevice(world_.device().index())
          .value()
          ->share();
};

TEST_F(OffloadPeakBound, HasWhatTheProgramHoldsFromThePackOnInWhichItWasEvicted) {
  ExpectBoundRaisedFromThePackOn([this](size_t i) { return Activations(i); }, kTensorBytes);
}

TEST_F(OffloadPeakBound, HasWhatNeverLeavesFromThePackOnInWhichItIsToBeAway) {
  ExpectBoundRaisedFromThePackOn([this](size_t) { return Leaves(); }, kTensorBytes);
}

// The parcel's other tensors, which the program does not reference, are freed.
TEST_F(OffloadPeakBound, HasWhatTheProgramHoldsOfThatWhichWasGathered) {
  ExpectBoundRaisedFromThePackOn([this](size_t i) { return SmallViews(i); }, kViewBytes);
}

}  // namespace offload_peak_bound_test
}  // namespace pinion::testing
