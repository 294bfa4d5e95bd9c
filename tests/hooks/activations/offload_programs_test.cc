// Checks programs in which other projects' offload fails: experts behind a router, adapters around
// frozen layers, encoders of several widths. Also checks the calls to the framework's allocator.

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/bench/peers/trl_offload.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/live_tensor.h"
#include "pinion/hooks/activations/module_heads.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/autocast_region.h"
#include "pinion/tests/hooks/support/counting_allocator.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace offload_programs_test {

using ::testing::HasSubstr;

// --- Experts ---

constexpr int64_t kExperts = 4;
constexpr int64_t kChannels = 32;
constexpr int kKinds = 20;  // kinds of steps: rows, and the expert without any

class Experts {
 public:
  explicit Experts(c10::Device device) : device_(device) {
    at::manual_seed(7);
    const auto weight = [&](int64_t out, int64_t in) {
      parameters_.push_back((at::randn({out, in}) * 0.2).to(device).requires_grad_(true));
    };
    weight(kExperts, kChannels);
    for (int64_t expert = 0; expert < kExperts; ++expert) {
      weight(4 * kChannels, kChannels);
      weight(kChannels, 4 * kChannels);
    }
  }

  // Every fifth kind may give rows to all experts; in the others, one expert gets none.
  at::Tensor Loss(int kind) {
    at::manual_seed(kind);
    const at::Tensor x = at::randn({48 + 8 * (kind % 7), kChannels}).to(device_);
    const at::Tensor logits = at::linear(at::gelu(x), parameters_[0]);
    const at::Tensor gates = at::softmax(logits, 1);
    const at::Tensor allowed = at::ones({kExperts});
    if (kind % 5 < kExperts) allowed[kind % 5] = 0;
    const at::Tensor chosen = at::argmax(at::mul(gates.detach().cpu(), allowed), 1);
    at::Tensor y = x;
    for (int64_t expert = 0; expert < kExperts; ++expert) {
      const at::Tensor rows = at::nonzero(chosen.eq(expert)).squeeze(1).to(device_);
      without_rows_ += rows.numel() == 0;
      const at::Tensor* const p = &parameters_[1 + 2 * expert];
      const at::Tensor result =
          at::linear(at::gelu(at::linear(at::index_select(x, 0, rows), p[0])), p[1]);
      const at::Tensor gate = at::index_select(gates.select(1, expert), 0, rows).unsqueeze(1);
      y = y.index_add(0, rows, at::mul(result, gate));
    }
    // For the log only: no backward reads what this saves.
    logged_ = at::logsumexp(logits, 1).mean();
    return y.square().mean();
  }

  std::vector<at::Tensor> Step(int kind, const std::shared_ptr<OffloadSession>& session) {
    const at::Tensor loss = InScope(session, [&] { return Loss(kind); });
    loss.backward();
    logged_.reset();
    return TakeGradients(parameters_);
  }

  int without_rows() const { return without_rows_; }

 private:
  const c10::Device device_;
  std::vector<at::Tensor> parameters_;
  at::Tensor logged_;
  int without_rows_ = 0;
};

struct Has {
  uint64_t device_bytes = 0;
  uint64_t pinned_bytes = 0;
};

Has Look(EmuWorld& world) {
  world.ExpectNothingLeft();
  return {world.device_bytes(), world.session()->GetAllocatorStats().locked_bytes.current};
}

class OffloadExperts : public ::testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(, OffloadExperts, ::testing::Bool(), [](const auto& info) {
  return info.param ? "WithAMemoryTarget" : "WithWindows";
});

TEST_P(OffloadExperts, HundredsOfStepsOfAnyRowsHaveTheSameBitsAndLeaveNothing) {
  if (GetParam() && TestsRunOnGpu()) GTEST_SKIP() << "cuBLAS holds more than the target";
  std::vector<std::vector<at::Tensor>> plain;
  uint64_t peak_bytes = 0;
  {
    EmuWorld world;
    Experts experts(world.device());
    for (int kind = 0; kind < kKinds; ++kind) plain.push_back(experts.Step(kind, nullptr));
    EXPECT_GE(experts.without_rows(), kKinds * 4 / 5);
    peak_bytes = world.peak_device_bytes();
  }
  EmuWorld world(MachineOptions(),
                 GetParam() ? WithTarget(peak_bytes * 9 / 10) : SmallWindows(1 << 10));
  Experts experts(world.device());
  constexpr int kSteps = 15 * kKinds;
  Has early;
  for (int step = 0; step < kSteps; ++step) {
    if (step == 3 * kKinds) early = Look(world);
    ExpectSame(plain[step % kKinds], experts.Step(step % kKinds, world.session()));
  }
  const Has late = Look(world);
  EXPECT_EQ(late.device_bytes, early.device_bytes);
  EXPECT_EQ(late.pinned_bytes, early.pinned_bytes);
  const OffloadStats stats = world.QuietStats();
  EXPECT_GT(stats.evicted_bytes, 0u);
  EXPECT_GT(stats.prefetch_hits, 0u);
  EXPECT_EQ(stats.kept_as_planned > 0, GetParam());
}

// A scope around all steps, as in TRL before it dropped unread tensors at each step (#5730).
TEST(OffloadExpertsInTrl, WhatNoBackwardReadsStaysOnTheDeviceForGood) {
  EmuWorld world;
  Experts experts(world.device());
  const TrlScope scope(std::make_shared<TrlOffload>(TrlOptions{}, world.device()));
  std::vector<uint64_t> bytes;
  for (int round = 0; round < 3; ++round) {
    for (int kind = 0; kind < kKinds; ++kind) experts.Step(kind, nullptr);
    EXPECT_TRUE(world.Synchronize().ok());
    bytes.push_back(world.device_bytes());
  }
  EXPECT_GT(bytes[1], bytes[0]);
  EXPECT_EQ(bytes[2] - bytes[1], bytes[1] - bytes[0]);
}

// --- Adapters ---

enum class Precision { kFull, kAutocast, kAutocastOfFullWeights };

// Frozen layers with a low-rank adapter each. No other tensor has this width.
class AdaptedImpl : public torch::nn::Module {
 public:
  static constexpr int64_t kWidth = 72;
  static constexpr int64_t kRank = 8;
  static constexpr int kLayers = 3;

  AdaptedImpl(c10::Device device, Precision precision) {
    at::manual_seed(11);
    const auto parameter = [&](const std::string& name, at::Tensor value, bool trains) {
      return register_parameter(name, (value * 0.2).to(device), trains);
    };
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::string name = std::to_string(layer);
      at::Tensor weight = at::randn({kWidth, kWidth});
      if (precision == Precision::kAutocast) weight = weight.to(at::kBFloat16);
      frozen_.push_back(parameter("frozen" + name, weight, /*trains=*/false));
      down_.push_back(parameter("down" + name, at::randn({kRank, kWidth}), /*trains=*/true));
      up_.push_back(parameter("up" + name, at::randn({kWidth, kRank}), /*trains=*/true));
    }
    input_ = at::randn({128, kWidth}).to(device);
  }

  at::Tensor forward() {
    at::Tensor x = input_;
    for (int layer = 0; layer < kLayers; ++layer) {
      const at::Tensor low = at::linear(at::dropout(x, 0.1, /*train=*/true), down_[layer]);
      x = at::gelu(at::add(at::linear(x, frozen_[layer]), at::mul(at::linear(low, up_[layer]), 2)));
    }
    return x.to(at::kFloat).square().mean();
  }

 private:
  std::vector<at::Tensor> frozen_, down_, up_;
  at::Tensor input_;
};
TORCH_MODULE(Adapted);

at::Tensor Forward(Adapted& model, const std::shared_ptr<OffloadSession>& session) {
  std::optional<OffloadScope> scope;
  if (session != nullptr) scope.emplace(session, *model);
  return model->forward();
}

std::vector<at::Tensor> StepOf(Adapted& model, Precision precision,
                               const std::shared_ptr<OffloadSession>& session,
                               std::string* live = nullptr) {
  SeedGenerators();
  const at::Tensor loss = [&] {
    std::optional<AutocastRegion> region;
    if (precision != Precision::kFull) region.emplace(model->parameters()[0].device().type());
    return Forward(model, session);
  }();
  if (live != nullptr) *live = ToString(session->LiveTensors());
  loss.backward();
  return TakeGradients(model->parameters());
}

class OffloadAdapters : public ::testing::TestWithParam<Precision> {};

INSTANTIATE_TEST_SUITE_P(, OffloadAdapters,
                         ::testing::Values(Precision::kFull, Precision::kAutocast,
                                           Precision::kAutocastOfFullWeights));

TEST_P(OffloadAdapters, HaveTheSameGradientsAndFrozenWeightsOfTheComputesPrecisionStay) {
  EmuWorld world(MachineOptions(), SmallWindows(1));
  Adapted model(world.device(), GetParam());
  const std::vector<at::Tensor> plain = StepOf(model, GetParam(), nullptr);
  for (int step = 0; step < 3; ++step) {
    std::string live;
    ExpectSame(plain, StepOf(model, GetParam(), world.session(), &live));
    EXPECT_THAT(live, HasSubstr("[128, 72]"));
    // Casts of frozen weights have no link to them (docs/users/limits.md).
    EXPECT_EQ(live.find("[72, 72]") != std::string::npos,
              GetParam() == Precision::kAutocastOfFullWeights)
        << live;
    world.ExpectNothingLeft();
  }
  const OffloadStats stats = world.QuietStats();
  EXPECT_GT(stats.evicted_bytes, 0u);
  EXPECT_GT(stats.fetched_bytes, 0u);
  EXPECT_EQ(stats.kept_parameter > 0, GetParam() != Precision::kAutocastOfFullWeights);
}

// A skipped step, for example after a loss that is not finite, leaves its graph unread.
TEST(OffloadSkippedStep, OfAdaptersLeavesNothingBehind) {
  EmuWorld world(MachineOptions(), SmallWindows(1));
  Adapted model(world.device(), Precision::kFull);
  Forward(model, nullptr);  // allocates cuBLAS's workspace
  const uint64_t before = world.device_bytes();
  Forward(model, world.session());
  world.ExpectNothingLeft();
  EXPECT_EQ(world.device_bytes(), before);
  EXPECT_GT(world.QuietStats().evicted_bytes, 0u);
}

// TRL's record of the skipped step once made the next forward fail (trl#4280).
TEST(OffloadSkippedStep, IsRememberedByTrl) {
  EmuWorld world;
  Adapted model(world.device(), Precision::kFull);
  const uint64_t before = world.device_bytes();
  const TrlScope scope(
      std::make_shared<TrlOffload>(TrlOptions{.parameters = model->parameters()}, world.device()));
  Forward(model, nullptr);
  EXPECT_TRUE(world.Synchronize().ok());
  EXPECT_GT(world.device_bytes(), before);
}

// --- Encoders ---

// Two encoders of different widths and one decoder. The first encoder is frozen. The decoder's
// kernel takes pitched rows, like compiled programs, and checks their strides in backward.
class TwoEncodersImpl : public torch::nn::Module {
 public:
  explicit TwoEncodersImpl(c10::Device device) {
    at::manual_seed(13);
    vision_ = register_module("vision", torch::nn::Linear(48, 64));
    audio_ = register_module("audio", torch::nn::Linear(80, 64));
    decoder_ = register_module("decoder", torch::nn::Linear(64, 64));
    to(device);
    for (at::Tensor& parameter : vision_->parameters()) parameter.requires_grad_(false);
    seen_ = at::randn({96, 48}).to(device);
    heard_ = at::randn({32, 80}).to(device);
  }

  at::Tensor forward() {
    const at::Tensor tokens =
        at::cat({at::gelu(vision_->forward(seen_)), at::gelu(audio_->forward(heard_))});
    at::Tensor x = decoder_->forward(tokens);
    const at::Tensor pitched = at::cat({x, x.narrow(1, 0, 16)}, 1).narrow(1, 0, 64);
    x = Probe(x, {pitched}, [](const at::Tensor& grad, const UnpackSaved& unpack) {
      const at::Tensor read = unpack()[0];
      TORCH_CHECK(read.strides() == at::IntArrayRef({80, 1}), "expected a pitch of 80, got ",
                  read.stride(0));
      return at::mul(grad, read);
    });
    return at::gelu(x).square().mean();
  }

 private:
  torch::nn::Linear vision_{nullptr}, audio_{nullptr}, decoder_{nullptr};
  at::Tensor seen_, heard_;
};
TORCH_MODULE(TwoEncoders);

TEST(OffloadTwoEncoders, IntoOneDecoderHaveTheSameBits) {
  EmuWorld world(MachineOptions(), SmallWindows(1));
  TwoEncoders model(world.device());
  model->forward().backward();
  const std::vector<at::Tensor> plain = TakeGradients(model->parameters());
  const ModuleHeads heads = FindHeads(*model, {.warn_if_no_head = false});
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = [&] {
      const OffloadScope scope(world.session(), *model, heads);
      return model->forward();
    }();
    loss.backward();
    ExpectSame(plain, TakeGradients(model->parameters()));
  }
  const OffloadStats stats = world.QuietStats();
  EXPECT_GT(stats.evicted_bytes, 0u);
  EXPECT_GT(stats.fetched_bytes, 0u);
  world.ExpectNothingLeft();
}

// torchtune#2709 is such an error: a compiled kernel does not get the stride that it expects.
TEST(OffloadTwoEncoders, InTrlWhatHasAPitchComesBackWithoutIt) {
  EmuWorld world;
  TwoEncoders model(world.device());
  const TrlScope scope(std::make_shared<TrlOffload>(
      TrlOptions{.max_fwd_stash_size = 1, .parameters = model->parameters()}, world.device()));
  EXPECT_THAT(ErrorOf([&] { model->forward().backward(); }),
              HasSubstr("expected a pitch of 80, got 64"));
}

// --- The framework's allocator ---

class OffloadAllocatorCalls : public ::testing::Test {
 protected:
  // Runs a net's step, and two nodes that return views of their saved tensors.
  void Step() {
    net_.Loss().backward();
    const at::TensorOptions emu(world_.device());
    const auto give_away = [](const at::Tensor&, const UnpackSaved& unpack) {
      return unpack()[0].t();
    };
    at::Tensor y = at::mul(at::ones({64, 64}, emu).requires_grad_(), 1);
    for (int i = 0; i < 2; ++i) y = Probe(y, {Activation(y, {64, 64}, i)}, give_away);
    y.backward(at::ones({64, 64}, emu));
  }
  // Counts the recorded uses of memory on a stream other than its own, which delay reuse.
  uint64_t streams_recorded() { return world_.machine().memory_stats(0).streams_recorded; }

  EmuWorld world_{MachineOptions(), SmallWindows(1)};
  const TestNet net_{world_.device(), at::kFloat};
};

// record_stream and emptied caches let reserved memory grow (pytorch#147168, torchtitan#735).
TEST_F(OffloadAllocatorCalls, AStepRecordsNoStreamAndEmptiesNoCache) {
  const CountingAllocator allocator(world_.device().type());
  for (const auto& session : {world_.session(), world_.NewSession(WithTarget(1))}) {
    for (const bool autocast : {false, true}) {
      for (int step = 0; step < 3; ++step) {
        std::optional<AutocastRegion> region;
        if (autocast) region.emplace(world_.device().type());
        const OffloadScope scope(session);
        Step();
      }
    }
    EXPECT_GT(session->GetStats().evicted_bytes, 0u);
    EXPECT_GT(session->GetStats().fetched_bytes, 0u);
  }
  EXPECT_EQ(streams_recorded(), 0u);
  EXPECT_EQ(allocator.caches_emptied(), 0);
}

TEST_F(OffloadAllocatorCalls, PrefetchesForWhichItGivesItsCacheBackBecomeRare) {
  CountingAllocator allocator(world_.device().type());
  const std::shared_ptr<OffloadSession> session = world_.NewSession(SmallWindows());
  const auto fetched_on_demand = [&] {
    const uint64_t before = session->GetStats().fetched_on_demand;
    const OffloadScope scope(session);
    net_.Loss().backward();
    return session->GetStats().fetched_on_demand - before;
  };
  const uint64_t with_room = fetched_on_demand();
  EXPECT_EQ(fetched_on_demand(), with_room);
  allocator.is_full = true;
  EXPECT_GT(fetched_on_demand(), with_room);
  allocator.is_full = false;
  EXPECT_EQ(fetched_on_demand(), with_room) << "the next backward tries at once";
}

// With bitsandbytes, TRL empties the cache at each context entry.
TEST_F(OffloadAllocatorCalls, InTrlAStepDoesBoth) {
  const CountingAllocator allocator(world_.device().type());
  const auto trl = std::make_shared<TrlOffload>(
      TrlOptions{.max_fwd_stash_size = 1, .parameters = net_.parameters()}, world_.device());
  for (int step = 1; step <= 3; ++step) {
    const uint64_t before = streams_recorded();
    c10::getDeviceAllocator(world_.device().type())->emptyCache();
    const TrlScope scope(trl);
    Step();
    EXPECT_GT(streams_recorded(), before);
    EXPECT_EQ(allocator.caches_emptied(), step);
  }
}

}  // namespace offload_programs_test
}  // namespace pinion::testing
