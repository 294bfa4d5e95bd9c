// Streamed weights that no operator uses give way, within a memory target: to the layer that
// another model is about to use, and to a session's step. The device has not a byte more than the
// target.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/hooks/weights/streamed_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace idle_weights {

using at::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int kLayers = 8;
constexpr int64_t kRows = 32;                                   // an activation is half of a unit
constexpr int64_t kMeasuredBytes = (kLayers + 2) * kUnitBytes;  // all weights fit in it

// How the weights of the trained model are stored.
enum class Trained { kStreamed, kOnDevice };

// A trained model in a session's scope, and a model with streamed weights that scores batches.
class TwoModels {
 public:
  // Weights have `weights`, the session `session_bytes`.
  TwoModels(Trained trained, const WeightOptions& weights, uint64_t session_bytes)
      : world_(MachineOptions(), WithTarget(session_bytes)), trained_(kLayers), scoring_(kLayers) {
    scores_ = Attach(*scoring_, weights);
    if (trained == Trained::kOnDevice) {
      trained_->to(world_.device());
    } else {
      trains_ = Attach(*trained_, weights);
      optimizer_.emplace(trains_->host_parameters(), torch::optim::SGDOptions(0.01));
    }
    EXPECT_THAT(world_.Synchronize(), IsOk());
    world_.ResetPeak();
    refusals_before_ = Refusals();
  }

  // The device has no more from here on.
  void Limit(uint64_t size_bytes) {
    EXPECT_THAT(world_.machine().SetMemoryLimit(0, size_bytes), IsOk());
  }
  // Runs a program, a letter a part. S scores a batch. The others train a step:
  //   T  no more than that
  //   N  scores two batches between forward and backward
  //   M  allocates kMeasuredBytes behind its last save
  //   P  like M, and scores a batch before that save
  //   Q  allocates kMeasuredBytes and then scores a batch, between forward and backward
  void Run(const std::string& program) {
    for (const char part : program) {
      if (part == 'S') Score();
      if (part == 'T' || part == 'N' || part == 'M' || part == 'P' || part == 'Q') {
        Train(part);
      }
    }
  }

  void ForgetScoring() {
    scores_.reset();
    scoring_ = nullptr;
  }

  uint64_t peak_bytes() { return world_.peak_device_bytes(); }
  int64_t refusals() const { return Refusals() - refusals_before_; }
  WeightStats scoring() const { return scores_->GetStats(); }
  WeightStats trained() const { return trains_->GetStats(); }
  EmuWorld& world() { return world_; }
  Net& trained_net() { return trained_; }
  Net& scoring_net() { return scoring_; }

  Tensors results;

 private:
  std::unique_ptr<WeightOffloader> Attach(torch::nn::Module& net, const WeightOptions& options) {
    auto attached = WeightOffloader::Attach(net, world_.device(), world_.backend(), options);
    EXPECT_TRUE(attached.ok()) << attached.status();
    return *std::move(attached);
  }
  int64_t Refusals() const {
    const c10::Device device = world_.device();
    return c10::getDeviceAllocator(device.type())->getDeviceStats(device.index()).num_ooms;
  }
  Tensor NextInput() { return Input(static_cast<double>(++inputs_), kRows).to(world_.device()); }
  void Score() {
    const at::NoGradGuard no_grad;
    results.push_back(scoring_->forward(NextInput()).cpu());
  }
  void Train(char part) {
    const Tensor x = NextInput();
    Tensor loss;
    {
      const OffloadScope scope(world_.session());
      const Tensor y = trained_->forward(x);
      if (part == 'P') Score();
      const Tensor squares = y.pow(2);
      if (part == 'M' || part == 'P') at::empty({kMeasuredBytes}, y.options().dtype(at::kByte));
      loss = squares.mean();
    }
    if (part == 'N') Run("SS");
    if (part == 'Q') {
      at::empty({kMeasuredBytes}, loss.options().dtype(at::kByte));
      Score();
    }
    loss.backward();
    results.push_back(loss.detach().cpu());
    loss = Tensor();
    if (trains_ == nullptr) {
      for (const Tensor& parameter : trained_->parameters()) {
        results.push_back(parameter.grad().cpu());
      }
      trained_->zero_grad();
      return;
    }
    trains_->Step([&] { optimizer_->step(); });
    for (const Tensor& master : trains_->host_parameters()) {
      results.push_back(master.detach().clone());
    }
    trains_->ZeroGrad();
  }

  EmuWorld world_;
  Net trained_;
  Net scoring_;
  std::unique_ptr<WeightOffloader> trains_;
  std::unique_ptr<WeightOffloader> scores_;
  std::optional<torch::optim::SGD> optimizer_;
  int64_t refusals_before_ = 0;
  int inputs_ = 0;
};

WeightOptions Target(uint64_t target_bytes) {
  return {.tier = SmallTier(), .memory_target_bytes = target_bytes};
}
WeightOptions Window(int units) {
  return {.tier = SmallTier(), .window_bytes = units * kUnitBytes};
}

void ExpectSame(const Tensors& expected, const Tensors& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(SameBytes(expected[i], actual[i])) << "result " << i;
  }
}

// The results with all weights on the device.
Tensors ResultsOf(Trained trained, const std::string& program) {
  TwoModels models(trained, Window(kLayers), 1 << 30);
  models.Run(program);
  return std::move(models.results);
}

// The least memory of a program whose idle weights take none: with one unit at a time, and all
// activations offloaded.
uint64_t LeastOf(Trained trained, const std::string& program) {
  uint64_t least_bytes = 0;
  for (const char part : program) {
    TwoModels models(trained, Window(1), 1);
    models.Run(std::string(3, part));
    least_bytes = std::max(least_bytes, models.peak_bytes());
  }
  return least_bytes;
}

class IdleWeights : public ::testing::TestWithParam<std::tuple<Trained, std::string, int>> {};

TEST_P(IdleWeights, OfAnotherModelGiveWay) {
  const auto& [trained, program, more_units] = GetParam();
  const Tensors expected = ResultsOf(trained, program);
  const uint64_t target_bytes = LeastOf(trained, program) + more_units * kUnitBytes;
  TwoModels models(trained, Target(target_bytes), target_bytes);
  models.Limit(target_bytes);
  models.Run(program);
  ExpectSame(expected, models.results);
  EXPECT_EQ(models.refusals(), 0);
  EXPECT_LE(models.peak_bytes(), target_bytes);
  EXPECT_GT(models.scoring().drops, 0u);
  EXPECT_GT(models.scoring().fetches, static_cast<uint64_t>(kLayers)) << "and come back";
}

INSTANTIATE_TEST_SUITE_P(
    , IdleWeights,
    ::testing::Combine(::testing::Values(Trained::kStreamed, Trained::kOnDevice),
                       ::testing::Values("STTTSTTTSTTTS", "TTTSTTTSTTTS", "SSSTTTTSSSTTTT",
                                         "TTTTSSTTTSSTTT", "NTNTNT", "NNNNN"),
                       ::testing::Values(0, 1, 2, 3, 5, 8)),
    [](const auto& row) {
      const bool is_streamed = std::get<0>(row.param) == Trained::kStreamed;
      return std::get<1>(row.param) + (is_streamed ? "Streamed" : "OnDevice") +
             std::to_string(std::get<2>(row.param));
    });

TEST(IdleWeightsOfTwoModels, ThatFitTogetherStay) {
  constexpr uint64_t kMore = 8 << 20;
  const uint64_t target_bytes = LeastOf(Trained::kStreamed, "TS") + kMore;
  TwoModels models(Trained::kStreamed, Target(target_bytes), target_bytes);
  models.Run("SSTTTTSSTTTTSS");
  const WeightStats scoring = models.scoring(), trained = models.trained();
  models.Run("TTTSTTTSTTTS");
  EXPECT_EQ(models.scoring().drops, scoring.drops);
  EXPECT_EQ(models.scoring().fetches, scoring.fetches);
  EXPECT_EQ(models.trained().fetches - trained.fetches, 9u * kLayers) << "as each step changes all";
}

// `scoring`: the kind of step in which the other model's weights come to the device.
class SeenGrowth : public ::testing::TestWithParam<std::string> {};

TEST_P(SeenGrowth, IsLeftFreeByWeightsThatWereNotThereThen) {
  const std::string scoring = GetParam();
  const std::string later = scoring + "TTTM" + scoring + "TTTM";
  const uint64_t target_bytes = [] {
    TwoModels models(Trained::kOnDevice, Window(1), 1 << 30);
    models.Run("TTTTM");
    return models.peak_bytes();
  }();
  const Tensors expected = ResultsOf(Trained::kOnDevice, "TTTTM" + later);
  TwoModels models(Trained::kOnDevice, Target(target_bytes), target_bytes);
  models.Limit(target_bytes);
  models.Run("TTTTM");
  EXPECT_EQ(models.peak_bytes(), target_bytes) << "the test's premise: it fits";
  models.Run(later);
  ExpectSame(expected, models.results);
  EXPECT_EQ(models.refusals(), 0);
  EXPECT_GT(models.scoring().drops, 0u);
}

INSTANTIATE_TEST_SUITE_P(, SeenGrowth, ::testing::Values("N", "P"), [](const auto& scoring) {
  return scoring.param == "N" ? "BetweenForwardAndBackward" : "WithinTheForward";
});

// Nobody observes the memory between a scope and its backward: its peak is seen, and not when.
TEST(IdleWeightsOfTwoModels, LeaveAGrowthFreeThatWasSeenInTheIntervalInWhichTheyCame) {
  const std::string program = "SSTTTTQTTTQTTTQ";
  const uint64_t target_bytes = [] {
    TwoModels models(Trained::kOnDevice, Window(1), 1 << 30);
    models.Run("TTTTQ");
    return models.peak_bytes();
  }();
  const Tensors expected = ResultsOf(Trained::kOnDevice, program);
  TwoModels models(Trained::kOnDevice, Target(target_bytes), target_bytes);
  models.Limit(target_bytes);
  models.Run(program);
  ExpectSame(expected, models.results);
  EXPECT_EQ(models.refusals(), 0);
  EXPECT_GT(models.scoring().drops, 0u);
}

TEST(IdleWeightsOfTwoModels, HaveNoRoomInPlansOnceTheirModelHasGone) {
  const uint64_t target_bytes = LeastOf(Trained::kOnDevice, "T");
  for (const bool has_gone : {false, true}) {
    TwoModels models(Trained::kOnDevice, Window(1), target_bytes);
    models.Run("S");
    if (has_gone) models.ForgetScoring();
    models.Run("TTTT");
    EXPECT_EQ(models.world().session()->Explain(0).find("streamed weights") == std::string::npos,
              has_gone);
  }
}

TEST(IdleWeightsOfTwoModels, StayWhileAnOperatorUsesThem) {
  const uint64_t target_bytes = LeastOf(Trained::kStreamed, "S") + 2 * kUnitBytes;
  TwoModels models(Trained::kStreamed, Target(target_bytes), target_bytes);
  models.Limit(target_bytes);
  const Net on_cpu(kLayers);
  const at::NoGradGuard no_grad;
  for (int round = 0; round < 3; ++round) {
    models.Run("SS");
    for (size_t i = 0; i < on_cpu->parameters().size(); ++i) {
      const Tensor trained = models.trained_net()->parameters()[i];
      const Tensor scoring = models.scoring_net()->parameters()[i];
      const Tensor expected = on_cpu->parameters()[i] * 2;
      EXPECT_TRUE(SameBytes((trained + scoring).cpu(), expected)) << i;
      EXPECT_TRUE(SameBytes((scoring + trained).cpu(), expected)) << i;
    }
  }
  EXPECT_EQ(models.refusals(), 0);
  EXPECT_GT(models.scoring().drops, 0u);
}

TEST(IdleWeightsOfTwoModels, GiveWayToALayerForWhichTheDeviceHasNoMemory) {
  TwoModels models(Trained::kStreamed, Window(kLayers), 1 << 30);
  models.Run("S");
  ASSERT_EQ(models.scoring().resident_bytes, kLayers * kUnitBytes);
  const at::NoGradGuard no_grad;
  const Tensor x = Input(1, kRows).to(models.world().device());
  models.Limit(models.world().device_bytes() + kUnitBytes - 512);
  const auto run_block = [](Net& net, const Tensor& input) {
    return net->blocks[0]->as<BlockImpl>()->forward(input).cpu();
  };
  Net on_cpu(kLayers);
  EXPECT_TRUE(SameBytes(run_block(models.trained_net(), x), run_block(on_cpu, Input(1, kRows))));
  EXPECT_GE(models.scoring().drops, static_cast<uint64_t>(kLayers));
  models.Limit(32 << 20);
  models.Run("S");
  EXPECT_TRUE(SameBytes(models.results[1], Net(kLayers)->forward(Input(2, kRows))));
}

}  // namespace idle_weights
}  // namespace pinion::testing
