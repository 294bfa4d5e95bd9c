// What a planned step promises to weights that share its memory target: its peak, and beside that
// what is to be away by then and is there, since the program has it.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/schedule/set_aside.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/tier/torch_tier.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace offload_promise_test {

constexpr int64_t kTensorBytes = 256 * kKiB;
constexpr int64_t kViewBytes = 16 * kKiB;  // small enough to be gathered
constexpr size_t kNodes = 6;

using Tensors = std::vector<at::Tensor>;

class OffloadPromise : public ::testing::Test {
 protected:
  // What node `i` saves, and the program may hold.
  using Make = std::function<Tensors(size_t i)>;

  Tensors Activations(size_t i) {
    return {Activation(carrier_, {kTensorBytes / 4}, static_cast<int>(i))};
  }
  // Stays as it is while the program has it, since a copy would free nothing.
  Tensors Leaves() { return {at::ones({kTensorBytes / 4}, at::TensorOptions(world_.device()))}; }
  // Of storages that have far more: they are gathered, so that their parcel holds none of these.
  Tensors SmallViews(size_t i) {
    Tensors views;
    for (int n = 0; n < 2; ++n) {
      views.push_back(Activation(carrier_, {kTensorBytes / 4}, static_cast<int>(2 * i) + n)
                          .narrow(0, 0, kViewBytes / 4));
    }
    return views;
  }

  // Behind each pack of one step.
  struct Packs {
    std::vector<std::optional<StepPromise>> promises;
    std::vector<uint64_t> evicted_bytes;
    size_t FirstEviction() const {
      const auto more = [this](uint64_t bytes) { return bytes > evicted_bytes.front(); };
      return static_cast<size_t>(std::find_if(evicted_bytes.begin(), evicted_bytes.end(), more) -
                                 evicted_bytes.begin());
    }
  };
  // The program holds the first tensor of the first node until the step's end, if it `holds`.
  Packs RunStep(const std::shared_ptr<OffloadSession>& session, const Make& make, bool holds) {
    Packs packs;
    at::Tensor held;
    at::Tensor y = carrier_;
    {
      const OffloadScope scope(session);
      for (size_t i = 0; i < kNodes; ++i) {
        Tensors saved = make(i);
        if (i == 0 && holds) held = saved.front();
        y = Probe(y, saved, [](const at::Tensor& grad, const UnpackSaved& unpack) {
          unpack();
          return grad;
        });
        saved.clear();
        packs.promises.push_back(share_->promise());
        packs.evicted_bytes.push_back(session->GetStats().evicted_bytes);
      }
    }
    y.backward();
    y.reset();
    EXPECT_THAT(world_.Synchronize(), IsOk());
    EXPECT_TRUE(Soon([this] { return !share_->promise().has_value(); })) << "no step runs";
    return packs;
  }

  // In a session that plans for it, which has all of the first node's tensors away in between.
  std::shared_ptr<OffloadSession> Planned(const Make& make) {
    world_.ResetPeak();
    RunStep(world_.NewSession(WithTarget(1)), make, /*holds=*/false);
    const auto session = world_.NewSession(WithTarget(world_.peak_device_bytes() + kViewBytes / 2));
    for (int step = 0; step < 5; ++step) RunStep(session, make, /*holds=*/false);
    return session;
  }

  // From the pack on in which the plan has what the program holds away.
  void ExpectPromisedFromThePackOn(const Make& make, uint64_t held_bytes) {
    const std::shared_ptr<OffloadSession> session = Planned(make);
    const Packs usual = RunStep(session, make, /*holds=*/false);
    const size_t first = usual.FirstEviction();
    ASSERT_GT(first, 0u);
    ASSERT_LT(first, kNodes) << "nothing was evicted";
    const Packs packs = RunStep(session, make, /*holds=*/true);
    for (size_t i = 0; i < kNodes; ++i) {
      SCOPED_TRACE(i);
      ASSERT_TRUE(usual.promises[i].has_value());
      ASSERT_TRUE(packs.promises[i].has_value());
      EXPECT_EQ(usual.promises[i]->most_bytes, usual.promises[0]->most_bytes);
      EXPECT_EQ(packs.promises[i]->most_bytes,
                usual.promises[i]->most_bytes + (i < first ? 0 : held_bytes));
    }
  }

  EmuWorld world_;
  at::Tensor carrier_ = at::ones({1}, at::TensorOptions(world_.device())).requires_grad_(true);
  const std::shared_ptr<DeviceShare> share_ =
      TorchHostTier(SmallTier(), world_.backend(), world_.device().type())
          .value()
          ->ForDevice(world_.device().index())
          .value()
          ->share();
};

TEST_F(OffloadPromise, HasWhatTheProgramHoldsFromThePackOnInWhichItWasEvicted) {
  ExpectPromisedFromThePackOn([this](size_t i) { return Activations(i); }, kTensorBytes);
}

TEST_F(OffloadPromise, HasWhatNeverLeavesFromThePackOnInWhichItIsToBeAway) {
  ExpectPromisedFromThePackOn([this](size_t) { return Leaves(); }, kTensorBytes);
}

// Of what shares a parcel, what the program does not hold has gone.
TEST_F(OffloadPromise, HasWhatTheProgramHoldsOfThatWhichWasGathered) {
  ExpectPromisedFromThePackOn([this](size_t i) { return SmallViews(i); }, kViewBytes);
}

}  // namespace offload_promise_test
}  // namespace pinion::testing
