// A training step whose saved tensors rest elsewhere than in pinned memory: in a backing that
// carries them further, and in one that fails.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/engine/plan/link_calibration.h"
#include "pinion/engine/tier/backing.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/hooks/activations/device_offloader.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/activations/scope_packer.h"
#include "pinion/hooks/autograd/kept_tensor.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/tests/engine/tier/failing_backing.h"
#include "pinion/tests/engine/tier/slow_backing.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

// Offloads all but parameters, over a host tier of its own.
class BackingPacker final : public SavedTensorPacker {
 public:
  BackingPacker(EmuWorld& world, std::shared_ptr<PinnedAllocator> pool,
                std::shared_ptr<Backing> backing) {
    auto host = std::make_shared<HostTier>(HostTierOptions(), world.backend(), /*source=*/nullptr,
                                           std::move(pool), std::move(backing));
    offloader_ = std::make_shared<DeviceOffloader>(SmallWindows(), world.device(), AssumedLink(),
                                                   host, host->ForDevice(0).value(), stats_);
  }

  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place) override {
    std::unique_ptr<SavedTensor> saved;
    if (!tensor.requires_grad() || !tensor.is_leaf()) {
      saved = offloader_->Pack(tensor, place, tensor.is_leaf(), /*cast=*/nullptr, scope_);
    }
    return saved == nullptr ? KeepTensor(tensor) : std::move(saved);
  }

  void EndScope() {
    scope_.ended = true;
    offloader_->EndScope(scope_.id);
  }
  OffloadStats stats() const { return stats_->Get(); }

 private:
  PackScope scope_{NewScopeId(), CastNotes()};
  const std::shared_ptr<OffloadStatsRecorder> stats_ = std::make_shared<OffloadStatsRecorder>();
  std::shared_ptr<DeviceOffloader> offloader_;
};

at::Tensor Forward(const TestNet& net, const std::shared_ptr<BackingPacker>& packer) {
  SeedGenerators();
  const SavedTensorScope scope(packer);
  const at::Tensor loss = net.Loss();
  packer->EndScope();
  return loss;
}

class OffloadBackingTest : public ::testing::Test {
 protected:
  EmuWorld world_;
  const TestNet net_{world_.device(), at::kFloat};
  const Gradients plain_ = TrainStep(net_, nullptr);
  const std::shared_ptr<PinnedAllocator> pool_ =
      PinnedAllocator::Create(SmallWindows().allocator,
                              world_.backend().device(0).value()->pinned_source())
          .value();
};

TEST_F(OffloadBackingTest, WhatABackingCarriesFurtherComesBackAsItWas) {
  const auto backing = std::make_shared<SlowBacking>(world_.machine(), pool_);
  const auto packer = std::make_shared<BackingPacker>(world_, pool_, backing);
  const at::Tensor loss = Forward(net_, packer);
  backing->Drain();
  EXPECT_EQ(pool_->GetStats().used_bytes.current, 0u) << "all of it has gone on";
  loss.backward();
  ExpectSameGradients(plain_, TakeGradients(net_, loss));
  EXPECT_GT(packer->stats().evicted_bytes, 0u);
  EXPECT_GT(packer->stats().fetched_bytes, 0u);
  EXPECT_GT(backing->waits(), 0u) << "copies wait until their bytes have been read";
}

TEST_F(OffloadBackingTest, WhatABackingHasNoRoomForStaysOnTheDevice) {
  const auto backing = std::make_shared<FailingBacking>(pool_);
  backing->reserve = absl::ResourceExhaustedError("the file system is full");
  const auto packer = std::make_shared<BackingPacker>(world_, pool_, backing);
  const at::Tensor loss = Forward(net_, packer);
  EXPECT_GT(packer->stats().kept_no_host_memory, 0u);
  EXPECT_EQ(packer->stats().offloaded, 0u);
  loss.backward();
  ExpectSameGradients(plain_, TakeGradients(net_, loss));
}

TEST_F(OffloadBackingTest, ABackwardThatCannotReadItsBackingThrowsAndMayBeRepeated) {
  const auto backing = std::make_shared<FailingBacking>(pool_);
  const auto packer = std::make_shared<BackingPacker>(world_, pool_, backing);
  const at::Tensor loss = Forward(net_, packer);
  backing->to_read = absl::DataLossError("the file is too short");
  EXPECT_THROW(loss.backward(/*gradient=*/{}, /*retain_graph=*/true), c10::Error);
  TakeGradients(net_, loss);  // what it has left
  EXPECT_GT(packer->stats().evicted_bytes, 0u);

  backing->to_read = absl::OkStatus();
  loss.backward();
  ExpectSameGradients(plain_, TakeGradients(net_, loss));
  EXPECT_GT(packer->stats().fetched_bytes, 0u);
}

}  // namespace
}  // namespace pinion::testing
