// One memory target for streamed weights and everything else. The device has not a byte more, and
// is never asked for one. Results are bit-identical, and weights use the bytes that are left.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/GradMode.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/checkpoint/checkpoint.h"
#include "pinion/hooks/weights/master_watch.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/hooks/weights/streamed_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Tensors = std::vector<Tensor>;

// How often a device was asked for more than it had, whatever was done about it.
int64_t RefusalsOf(c10::Device device) {
  return c10::getDeviceAllocator(device.type())->getDeviceStats(device.index()).num_ooms;
}

constexpr int kLayers = 10;
constexpr int64_t kRows = 32;  // an activation is half of a unit
constexpr uint64_t kActivationBytes = kRows * kWidth * sizeof(float);

WeightOptions Weights(uint64_t target_bytes, bool gradients_stay = false) {
  return {
      .tier = SmallTier(), .memory_target_bytes = target_bytes, .gradients_stay = gradients_stay};
}

// What a part of a program does, with or without a graph.
enum class Part { kTrain, kAsk };

// A model whose weights are streamed, and what becomes of it, in a world of its own.
class World {
 public:
  enum class Attached { kNow, kLater };

  World(const WeightOptions& weights, const OffloadOptions& offload = WithTarget(1 << 30),
        Attached attached = Attached::kNow)
      : weight_options_(weights), world_(MachineOptions(), offload), net_(kLayers) {
    if (attached == Attached::kNow) Attach();
    refusals_before_ = RefusalsOf(world_.device());
  }

  // In an OffloadScope, if asked for; of each layer a checkpoint, if asked for.
  bool offloads = false;
  bool checkpoints = false;
  int backwards = 1;         // of each graph
  bool resets_peak = false;  // in the middle of each step, LibTorch's statistics of it

  // Until it is attached the model stays on the device, and is not changed.
  void StayForNow() { net_->to(world_.device()); }
  void Attach() {
    auto attached =
        WeightOffloader::Attach(*net_, world_.device(), world_.backend(), weight_options_);
    EXPECT_TRUE(attached.ok()) << attached.status();
    weights_ = *std::move(attached);
    optimizer_.emplace(weights_->host_parameters(), torch::optim::SGDOptions(0.01));
  }

  // From now on the device has no more.
  void Limit(uint64_t size_bytes) {
    EXPECT_THAT(world_.machine().SetMemoryLimit(0, size_bytes), IsOk());
  }
  void Do(Part part, int64_t rows = kRows) {
    const Tensor x = Input(static_cast<double>(++count_), rows).to(world_.device());
    if (part == Part::kAsk) {
      const at::NoGradGuard no_grad;
      results.push_back(net_->forward(x).cpu());
      return;
    }
    Tensor loss;
    {
      std::optional<OffloadScope> scope;
      if (offloads) scope.emplace(world_.session());
      loss = Forward(x).pow(2).mean();
    }
    if (resets_peak) c10::getDeviceAllocator(x.device().type())->resetPeakStats(x.device().index());
    for (int left = backwards - 1; left >= 0; --left) {
      loss.backward({}, /*retain_graph=*/left > 0);
    }
    results.push_back(loss.detach().cpu());
    loss = Tensor();
    if (weights_ == nullptr) return net_->zero_grad();
    weights_->Step([&] { optimizer_->step(); });
    for (const Tensor& master : weights_->host_parameters()) {
      results.push_back(master.detach().clone());
    }
    weights_->ZeroGrad();
  }
  uint64_t peak_bytes() { return world_.peak_device_bytes(); }
  void ResetPeak() {
    EXPECT_THAT(world_.Synchronize(), IsOk());
    world_.ResetPeak();
  }
  int64_t refusals() { return RefusalsOf(world_.device()) - refusals_before_; }
  WeightStats stats() const { return weights_->GetStats(); }
  OffloadStats offload_stats() { return world_.QuietStats(); }
  const std::shared_ptr<OffloadSession>& session() { return world_.session(); }

  Tensors results;

  Net& net() { return net_; }
  EmuWorld& world() { return world_; }

 private:
  Tensor Forward(Tensor x) {
    if (!checkpoints) return net_->forward(x);
    for (const auto& block : *net_->blocks) {
      x = checkpoint([block](const Tensor& in) { return block->as<BlockImpl>()->forward(in); }, x);
    }
    return x;
  }

  const WeightOptions weight_options_;
  EmuWorld world_;
  Net net_;
  std::unique_ptr<WeightOffloader> weights_;
  std::optional<torch::optim::SGD> optimizer_;
  int64_t refusals_before_ = 0;
  int count_ = 0;
};

void ExpectSame(const Tensors& expected, const Tensors& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(SameBytes(expected[i], actual[i])) << "result " << i;
  }
}

using Program = std::function<void(World&)>;

Program Repeat(int times, Part part) {
  return [times, part](World& world) {
    for (int n = 0; n < times; ++n) world.Do(part);
  };
}
Program Train(int steps) { return Repeat(steps, Part::kTrain); }

// The program's results with resident weights, and its least memory: with one unit of weights on
// the device at a time, and all activations offloaded if `offloads`.
struct Reference {
  Tensors results;
  uint64_t least_bytes = 0;
};
Reference ReferenceOf(const Program& program, bool offloads = false, bool gradients_stay = false) {
  Reference reference;
  {
    WeightOptions all = Weights(0, gradients_stay);
    all.window_bytes = kLayers * kUnitBytes;
    World world(all);
    program(world);
    reference.results = std::move(world.results);
  }
  WeightOptions one = Weights(0, gradients_stay);
  one.window_bytes = kUnitBytes;
  World world(one, WithTarget(1));
  world.offloads = offloads;
  world.ResetPeak();
  program(world);
  reference.least_bytes = world.peak_bytes();
  return reference;
}

// Runs the program on a device that has `target_bytes`, and is never asked for a byte more.
void ExpectWithin(uint64_t target_bytes, World& world, const Program& program,
                  const Tensors& expected) {
  world.Limit(target_bytes);
  program(world);
  ExpectSame(expected, world.results);
  EXPECT_EQ(world.refusals(), 0);
}

TEST(WeightTarget, InferenceKeepsWhatTheTargetLeavesAndNeverHasMore) {
  const Program ask = Repeat(6, Part::kAsk);
  const Reference reference = ReferenceOf(ask);
  for (const int more_units : {0, 1, 2, 4, 7, kLayers + 1}) {
    SCOPED_TRACE(more_units);
    const uint64_t target_bytes = reference.least_bytes + more_units * kUnitBytes;
    World world(Weights(target_bytes));
    ExpectWithin(target_bytes, world, ask, reference.results);
    const uint64_t fetches = world.stats().fetches;
    constexpr int kPasses = kLayers - 1;
    for (int n = 0; n < kPasses; ++n) world.Do(Part::kAsk);
    // The least has room for one unit. That nobody knows what is freed between two uses costs less
    // than another one.
    const int stay = std::max(more_units - 2, 0);
    int expected = kPasses * (kLayers - stay);
    if (more_units > kLayers) {
      expected = 0;
    } else if (2 * stay >= kLayers) {  // all move on, each fetched so many uses ahead
      const int away = kLayers - (more_units - 1);
      const int ahead = (kLayers + away - 1) / away;
      expected = kPasses * kLayers * (away - 1) / (kLayers - 1 - ahead);
    }
    EXPECT_EQ(world.stats().fetches - fetches, static_cast<uint64_t>(expected));
  }
}

TEST(WeightTarget, ActivationsAndWeightsShareOne) {
  const Program train = Train(5);
  const Reference reference = ReferenceOf(train, /*offloads=*/true);
  std::vector<uint64_t> kept, moved;
  for (const int percent : {100, 110, 130, 170, 250, 400}) {
    SCOPED_TRACE(percent);
    const uint64_t target_bytes = reference.least_bytes * percent / 100;
    World world(Weights(target_bytes), WithTarget(target_bytes));
    world.offloads = true;
    ExpectWithin(target_bytes, world, train, reference.results);
    ASSERT_GT(world.offload_stats().offloaded, 0u) << "in the first step all leaves";
    const WeightStats before = world.stats();
    const OffloadStats offload_before = world.offload_stats();
    world.ResetPeak();
    world.Do(Part::kTrain);
    moved.push_back(world.stats().fetches - before.fetches);
    kept.push_back(world.offload_stats().kept_as_planned - offload_before.kept_as_planned);
  }
  EXPECT_TRUE(std::is_sorted(kept.begin(), kept.end())) << ::testing::PrintToString(kept);
  EXPECT_TRUE(std::is_sorted(moved.rbegin(), moved.rend())) << ::testing::PrintToString(moved);
  EXPECT_LT(kept.front(), kept.back());
  EXPECT_EQ(moved.back(), static_cast<uint64_t>(kLayers)) << "all weights stay at the turn";
}

// The same results in targets of so many units more than the least. Then `check`.
void ExpectWithinTargets(const Program& program, bool offloads, const std::vector<int>& more_units,
                         const std::function<void(World&)>& check, bool gradients_stay = false) {
  const Reference reference = ReferenceOf(program, offloads, gradients_stay);
  for (const int more : more_units) {
    SCOPED_TRACE(::testing::Message() << more << " units more, offloads: " << offloads);
    const uint64_t target_bytes = reference.least_bytes + more * kUnitBytes;
    World world(Weights(target_bytes, gradients_stay), WithTarget(target_bytes));
    world.offloads = offloads;
    ExpectWithin(target_bytes, world, program, reference.results);
    check(world);
  }
}

TEST(WeightTarget, TrainingWithoutAScopeUsesWhatActivationsLeave) {
  const Program train = Train(4);
  const auto one_more = [](World& world) {
    const WeightStats before = world.stats();
    world.Do(Part::kTrain);
    EXPECT_GT(world.stats().fetched_ahead, before.fetched_ahead);
    return world.stats().fetches - before.fetches;
  };
  ExpectWithinTargets(train, /*offloads=*/false, {0, 1, 3},
                      [&](World& world) { EXPECT_LE(one_more(world), 2u * kLayers - 1); });
  ExpectWithinTargets(train, /*offloads=*/false, {kLayers}, [&](World& world) {
    EXPECT_LE(one_more(world), kLayers + 1u) << "the turn finds nearly all";
  });
}

TEST(WeightTarget, CheckpointsInTheSameScopeKeepWithinIt) {
  const Program train = [](World& world) {
    world.checkpoints = true;
    Train(5)(world);
  };
  ExpectWithinTargets(train, /*offloads=*/true, {0, 2, 5},
                      [](World& world) { EXPECT_GT(world.offload_stats().offloaded, 0u); });
}

struct NamedProgram {
  const char* name;
  Program run;
  std::vector<int> more_units = {0, 2, 5};
  bool gradients_stay = false;
};

class WeightTargetOfProgram
    : public ::testing::TestWithParam<std::tuple<NamedProgram, /*offloads*/ bool>> {};

TEST_P(WeightTargetOfProgram, IsKeptAndWeightsAreFetchedAhead) {
  const auto& [program, offloads] = GetParam();
  ExpectWithinTargets(
      program.run, offloads, program.more_units,
      [](World& world) { EXPECT_GT(world.stats().fetched_ahead, 0u); }, program.gradients_stay);
}

INSTANTIATE_TEST_SUITE_P(
    , WeightTargetOfProgram,
    ::testing::Combine(
        ::testing::Values(
            NamedProgram{
                "ShapesThatChange",
                [](World& world) {
                  for (const int64_t rows : {8, 32, 8, 16, 32, 32, 8, 8, 32, 16, 16, 16, 32}) {
                    world.Do(Part::kTrain, rows);
                  }
                }},
            NamedProgram{"TrainingAndAskingInTurn",
                         [](World& world) {
                           for (int n = 0; n < 4; ++n) {
                             Repeat(3, Part::kAsk)(world);
                             Train(n + 1)(world);
                           }
                         },
                         {0, 2, 6}},
            NamedProgram{"GraphsThatAreKept",
                         [](World& world) {
                           world.backwards = 3;
                           Train(5)(world);
                         }},
            NamedProgram{.name = "GradientsThatStay", .run = Train(5), .gradients_stay = true},
            NamedProgram{"ResetsOfThePeak",
                         [](World& world) {
                           world.resets_peak = true;
                           Train(5)(world);
                         }}),
        ::testing::Bool()),
    [](const auto& row) {
      return std::get<0>(row.param).name + std::string(std::get<1>(row.param) ? "AndOffload" : "");
    });

// Models that are asked by turns, each in an offloader of its own, on one device.
class Models {
 public:
  Models(int count, const WeightOptions& options) {
    for (int model = 0; model < count; ++model) {
      nets_.emplace_back(kLayers);
      auto attached =
          WeightOffloader::Attach(*nets_.back(), world_.device(), world_.backend(), options);
      EXPECT_TRUE(attached.ok()) << attached.status();
      weights_.push_back(*std::move(attached));
    }
    EXPECT_THAT(world_.Synchronize(), IsOk());
    world_.ResetPeak();
    refusals_before_ = RefusalsOf(world_.device());
  }

  int64_t refusals() { return RefusalsOf(world_.device()) - refusals_before_; }
  void Limit(uint64_t size_bytes) {
    EXPECT_THAT(world_.machine().SetMemoryLimit(0, size_bytes), IsOk());
  }
  Tensors Ask(int rounds) {
    const at::NoGradGuard no_grad;
    Tensors results;
    for (int round = 0; round < rounds; ++round) {
      for (Net& net : nets_) {
        results.push_back(net->forward(Input(round, kRows).to(world_.device())).cpu());
      }
    }
    return results;
  }
  uint64_t peak_bytes() { return world_.peak_device_bytes(); }
  const std::vector<std::unique_ptr<WeightOffloader>>& weights() const { return weights_; }

 private:
  EmuWorld world_;
  std::vector<Net> nets_;
  std::vector<std::unique_ptr<WeightOffloader>> weights_;
  int64_t refusals_before_ = 0;
};

TEST(WeightTarget, SeveralModelsKeepWithinIt) {
  constexpr int kRounds = 6;
  for (const int count : {1, 2, 3}) {
    SCOPED_TRACE(::testing::Message() << count << " models");
    WeightOptions options = Weights(0);
    options.window_bytes = kUnitBytes;
    Tensors expected;
    uint64_t least_bytes = 0;
    {
      Models models(count, options);
      expected = models.Ask(kRounds);
      least_bytes = models.peak_bytes();
    }
    options.window_bytes = 0;
    for (const int more_units : {0, 2, 5, kLayers * count}) {
      SCOPED_TRACE(more_units);
      options.memory_target_bytes = least_bytes + more_units * kUnitBytes;
      Models models(count, options);
      models.Limit(options.memory_target_bytes);
      ExpectSame(expected, models.Ask(kRounds));
      EXPECT_EQ(models.refusals(), 0);
      uint64_t ahead = 0;
      for (const auto& weights : models.weights()) ahead += weights->GetStats().fetched_ahead;
      if (more_units == 2 || more_units == 5) {
        EXPECT_GT(ahead, 0u);
      }
    }
  }
}

// Earlier plans have the whole model on the device, offload tensors because of it, and reserve no
// bytes for streamed weights.
TEST(WeightTarget, AModelThatIsAttachedLaterHasItsPartOfItInEveryShape) {
  constexpr int64_t kShapes[] = {126, 127, 128};
  const Program train = [&](World& world) {
    world.offloads = true;
    for (int round = 0; round < 4; ++round) {
      for (const int64_t rows : kShapes) world.Do(Part::kTrain, rows);
    }
  };
  uint64_t target_bytes = 0;
  Tensors expected;
  {
    WeightOptions all = Weights(0);
    all.window_bytes = kLayers * kUnitBytes;
    World world(all, WithTarget(1 << 30), World::Attached::kLater);
    world.StayForNow();
    world.ResetPeak();
    train(world);
    target_bytes = world.peak_bytes() - 16 * kActivationBytes;
    for (const int64_t rows : kShapes) world.Do(Part::kTrain, rows);
    world.Attach();
    train(world);
    expected = std::move(world.results);
  }
  World world(Weights(target_bytes), WithTarget(target_bytes), World::Attached::kLater);
  world.Limit(target_bytes);
  world.StayForNow();
  train(world);
  ASSERT_GT(world.offload_stats().kept_as_planned, 0u);
  const uint64_t offloaded = world.offload_stats().offloaded;
  for (const int64_t rows : kShapes) world.Do(Part::kTrain, rows);
  ASSERT_GT(world.offload_stats().offloaded, offloaded);
  world.Attach();
  train(world);
  ExpectSame(expected, world.results);
  for (const int64_t rows : kShapes) {
    SCOPED_TRACE(rows);
    const WeightStats before = world.stats();
    const uint64_t offloaded_before = world.offload_stats().offloaded;
    world.Do(Part::kTrain, rows);
    EXPECT_LT(world.stats().fetches - before.fetches, 2u * kLayers - 1) << "more than one is there";
    EXPECT_GT(world.stats().fetched_ahead, before.fetched_ahead);
    EXPECT_EQ(world.offload_stats().offloaded, offloaded_before) << "they have the model's place";
  }
  EXPECT_EQ(world.refusals(), 0);
}

// Two threads that ask one model at once, each as often as that.
class TwoThreads {
 public:
  static constexpr int kThreads = 2;
  static constexpr int kPasses = 12;

  explicit TwoThreads(World& world) : world_(world) {}

  // `before_each` and `behind_each` are called around what a thread does with each layer.
  using Call = std::function<void(int thread)>;
  void Run(const Call& before_each = {}, const Call& behind_each = {}) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        const at::NoGradGuard no_grad;
        for (int pass = 0; pass < kPasses; ++pass) {
          Tensor x;
          for (int layer = 0; layer < kLayers; ++layer) {
            if (before_each) before_each(thread);
            if (layer == 0) x = Input(1, kRows).to(world_.world().device());
            x = world_.net()->blocks[layer]->as<BlockImpl>()->forward(x);
            if (layer == kLayers - 1) results_[thread].push_back(std::exchange(x, Tensor()).cpu());
            if (behind_each) behind_each(thread);
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  void ExpectAll(const Tensor& expected) {
    for (const Tensors& results : results_) {
      EXPECT_EQ(results.size(), static_cast<size_t>(kPasses));
      for (const Tensor& result : results) EXPECT_TRUE(SameBytes(result, expected));
    }
    EXPECT_GE(world_.stats().fetches, static_cast<uint64_t>(kLayers));
  }

 private:
  World& world_;
  Tensors results_[kThreads];
};

// A layer of one, then a layer of the other: what follows a use is all there before the next one.
TEST(WeightTarget, TwoThreadsOfOneModelThatTakeTurnsKeepWithinIt) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "cuBLAS takes memory of its own for each thread";
  const Reference reference = ReferenceOf([](World& world) { world.Do(Part::kAsk); });
  for (const int more_units : {0, 1, 3, 6}) {
    SCOPED_TRACE(more_units);
    const uint64_t target_bytes =
        reference.least_bytes + kActivationBytes + more_units * kUnitBytes;
    World world(Weights(target_bytes));
    world.ResetPeak();
    TwoThreads threads(world);
    std::atomic<int> turn = 0;
    threads.Run(
        [&turn](int thread) {
          for (int now = turn; now != thread; now = turn) turn.wait(now);
        },
        [&turn](int thread) {
          turn = 1 - thread;
          turn.notify_all();
        });
    threads.ExpectAll(reference.results.front());
    EXPECT_LE(world.peak_bytes(), target_bytes);
  }
}

// A unit that the one fetches while the other looks may not count, nor does what both compute from
// then on until the next use.
TEST(WeightTarget, TwoThreadsOfOneModelHaveAtMostAUnitMoreAndWhatTheyComputeAtOnce) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "cuBLAS takes memory of its own for each thread";
  constexpr int kOfAUse = 4;  // activations, at most, with the next input
  constexpr uint64_t kMoreBytes = kUnitBytes + TwoThreads::kThreads * kOfAUse * kActivationBytes;
  const Reference reference = ReferenceOf([](World& world) { world.Do(Part::kAsk); });
  for (const int more_units : {0, 1}) {
    SCOPED_TRACE(more_units);
    const uint64_t target_bytes =
        TwoThreads::kThreads * reference.least_bytes + more_units * kUnitBytes;
    ASSERT_LT(target_bytes + kMoreBytes, kLayers * kUnitBytes + reference.least_bytes);
    World world(Weights(target_bytes));
    world.ResetPeak();
    TwoThreads threads(world);
    threads.Run();
    threads.ExpectAll(reference.results.front());
    EXPECT_LE(world.peak_bytes(), target_bytes + kMoreBytes);
  }
}

TEST(WeightTarget, OneBelowTheLargestUnitIsRefused) {
  EmuWorld world;
  Net net(2);
  EXPECT_THAT(
      WeightOffloader::Attach(*net, world.device(), world.backend(), Weights(1000)),
      StatusIs(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr("memory_target_bytes is 1000"),
                                                         HasSubstr("\"blocks.0\" alone needs"),
                                                         HasSubstr(std::to_string(kUnitBytes)))));
  WeightOptions both = Weights(1 << 20);
  both.window_bytes = 1 << 20;
  EXPECT_THAT(WeightOffloader::Attach(*net, world.device(), world.backend(), both),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("give one")));
}

// A device's allocator that counts nothing.
struct PlainAllocator : c10::Allocator {
  explicit PlainAllocator(c10::DeviceType its_type)
      : type(its_type), counting(c10::GetAllocator(type)) {
    c10::SetAllocator(type, this);
  }
  ~PlainAllocator() override { c10::SetAllocator(type, counting); }
  c10::DataPtr allocate(size_t size_bytes) override { return counting->allocate(size_bytes); }
  void copy_data(void* to, const void* from, size_t size_bytes) const override {
    counting->copy_data(to, from, size_bytes);
  }

  const c10::DeviceType type;
  c10::Allocator* const counting;
};

TEST(WeightTarget, OneIsRefusedWithoutAnAllocatorThatCountsAndAWindowIsNot) {
  EmuWorld world;
  Net net(2);
  const PlainAllocator plain(world.device().type());
  EXPECT_THAT(WeightOffloader::Attach(*net, world.device(), world.backend(), Weights(1)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("memory_target_bytes"), HasSubstr("give window_bytes"))));
  EXPECT_THAT(WeightOffloader::Attach(*net, world.device(), world.backend(), Weights(0)), IsOk());
}

TEST(WeightTarget, AModelOnAnotherDeviceIsRefusedByTheNamesOfItsWeights) {
  EmulatedOptions two = MachineOptions();
  two.device_count = 2;
  EmuWorld world(two);
  Net net(2);
  net->to(world.device(1));
  EXPECT_THAT(WeightOffloader::Attach(*net, world.device(0), world.backend(), Weights(1 << 20)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("is on emu:1 and was to be streamed to emu:0"),
                             HasSubstr("one by one"))));
}

// What lies behind a small weight, in memory that the program has made a tensor of, is not its.
TEST(WeightTarget, WhatLiesBehindAWeightIsNoChangeOfIt) {
  float values[4] = {1, 2, 3, 4};
  MasterWatch watch("weight", at::from_blob(values, {1}));
  values[1] = 20;
  EXPECT_FALSE(watch.HasChanged());
  values[0] = 10;
  EXPECT_TRUE(watch.HasChanged());
}

TEST(WeightTarget, OneThatCannotBeMetTellsTheLeastThatCan) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "cuBLAS takes memory of its own for each thread";
  const Program train = Train(3);
  const Reference reference = ReferenceOf(train);
  uint64_t told_bytes = 0;
  {
    World world(Weights(reference.least_bytes / 2));
    train(world);
    ExpectSame(reference.results, world.results);
    told_bytes = world.stats().excess_device_bytes;
    EXPECT_GT(told_bytes, reference.least_bytes / 2);
    EXPECT_LE(told_bytes, reference.least_bytes);
  }
  World world(Weights(told_bytes));
  ExpectWithin(told_bytes, world, train, reference.results);
}

// The peak that it resets was more than what it has from then on.
TEST(WeightTarget, AProgramThatResetsThePeakIsToldOfMoreThanTheTarget) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "cuBLAS takes memory of its own for each thread";
  const Program train = Train(3);
  const uint64_t target_bytes = ReferenceOf(train).least_bytes;
  World world(Weights(target_bytes));
  constexpr int64_t kMore = 8 << 20;
  const auto more = [&] { return at::empty({kMore}, at::TensorOptions(world.world().device())); };
  more();
  train(world);
  EXPECT_EQ(world.stats().excess_device_bytes, 0u) << "it had that before weights came";
  world.ResetPeak();
  const Tensor stays = at::empty({kMore / 16}, at::TensorOptions(world.world().device()));
  train(world);
  EXPECT_GE(world.stats().excess_device_bytes, stays.nbytes());
  EXPECT_LT(world.stats().excess_device_bytes, static_cast<uint64_t>(kMore));
}

TEST(WeightTarget, TheLeastOfActivationsHasTheLargestUnitInIt) {
  const Program train = [](World& world) {
    world.offloads = true;
    Train(3)(world);
  };
  World world(Weights(kUnitBytes), WithTarget(kUnitBytes));
  train(world);
  const std::string text = world.session()->Explain(0);
  EXPECT_THAT(text, HasSubstr("streamed weights, and verify's checksums, take at least " +
                              std::to_string(kUnitBytes)));
  const std::string before = "target's least is ";
  const size_t found = text.find(before);
  ASSERT_NE(found, std::string::npos) << text;
  const uint64_t least_bytes = std::stoull(text.substr(found + before.size()));
  const Reference reference = ReferenceOf(train);
  World within(Weights(least_bytes), WithTarget(least_bytes));
  ExpectWithin(least_bytes, within, train, reference.results);
}

}  // namespace
}  // namespace pinion::testing
