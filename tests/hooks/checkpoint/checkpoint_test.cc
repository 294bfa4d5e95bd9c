// Checks checkpoints on a device, each within an OffloadScope and without one.
// torch_checkpoint_test.cc compares them with torch.utils.checkpoint.

#include "pinion/hooks/checkpoint/checkpoint.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/checkpoint/checkpoint_module.h"
#include "pinion/hooks/checkpoint/forward_state.h"
#include "pinion/hooks/checkpoint/saved_tensors_hooks.h"
#include "pinion/hooks/plan/step_recorder.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/autocast_region.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace checkpoint_test {

using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

using at::Tensor;

constexpr int64_t kSide = 64;  // 16 KiB a tensor
constexpr size_t kBlocks = 4;

Tensor Weight(c10::Device device) {
  return (at::randn({kSide, kSide}) / 8).to(device).requires_grad_(true);
}

class CheckpointTest : public ::testing::TestWithParam<bool> {
 protected:
  CheckpointTest() {
    at::manual_seed(3);
    for (size_t i = 0; i < 2 * kBlocks; ++i) weights_.push_back(Weight(world_.device()));
    x_ = Weight(world_.device());
  }

  // Runs forward (in a scope if the test parameter says so) and backward, and takes the gradients.
  Gradients Step(const std::function<Tensor()>& forward) {
    SeedGenerators();
    Tensor y = Forward(forward);
    y.sum().backward();
    Gradients left = {.loss = y.detach().cpu(), .parameters = {}};
    y.reset();
    for (const Tensor& leaf : Leaves()) {
      left.parameters.push_back(leaf.grad().defined() ? leaf.grad().cpu() : Tensor());
      leaf.mutable_grad().reset();
    }
    return left;
  }
  Tensor Forward(const std::function<Tensor()>& forward) {
    std::optional<OffloadScope> scope;
    if (GetParam()) scope.emplace(world_.session());
    return forward();
  }

  Tensor Block(const Tensor& x, size_t block) {
    ++runs_;
    const Tensor wide = at::gelu(at::matmul(x, weights_[2 * block]));
    return at::matmul(at::dropout(wide, 0.2, /*train=*/true), weights_[2 * block + 1]);
  }
  Tensor Blocks(bool checkpointed) {
    Tensor x = at::tanh(x_);
    for (size_t i = 0; i < kBlocks; ++i) {
      const auto block = [this, i](const Tensor& in) { return Block(in, i); };
      x = checkpointed ? checkpoint(block, x) : block(x);
    }
    return x;
  }

  std::vector<Tensor> Leaves() const {
    std::vector<Tensor> leaves = weights_;
    leaves.push_back(x_);
    return leaves;
  }

  // Expects the same bits of both steps; the first run of `other` sets up the session.
  void ExpectSameSteps(const std::function<Tensor()>& plain, const std::function<Tensor()>& other) {
    const Gradients expected = Step(plain);
    ExpectSameGradients(expected, Step(other));
    ExpectSameGradients(expected, Step(other));
  }

  static EmulatedOptions TwoDevicesOptions() {
    EmulatedOptions machine = MachineOptions();
    machine.device_count = 2;
    return machine;
  }

  OffloadWorld world_{EverySize(1), TwoDevicesOptions()};
  std::vector<Tensor> weights_;
  Tensor x_;
  int runs_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Checkpoint, CheckpointTest, ::testing::Bool(), [](const auto& info) {
  return info.param ? "InAnOffloadScope" : "WithoutScope";
});

TEST_P(CheckpointTest, GradientsHaveTheBitsThatTheyHaveWithoutAndEachSegmentRunsTwice) {
  const Gradients expected = Step([this] { return Blocks(false); });
  runs_ = 0;
  ExpectSameGradients(expected, Step([this] { return Blocks(true); }));
  EXPECT_EQ(runs_, 2 * static_cast<int>(kBlocks));
  world_.ExpectNothingLeft();
}

TEST_P(CheckpointTest, OnlyTheInputsOfSegmentsAreSavedInForward) {
  const uint64_t before = world_.device_bytes();
  const OffloadStats stats_before = world_.stats();
  Tensor y = Forward([this] { return Blocks(true); });
  const uint64_t tensor_bytes = y.nbytes();
  const OffloadStats stats = world_.stats();
  if (GetParam()) {
    // The first segment's input is also tanh's output; both share a copy.
    EXPECT_EQ(stats.offloaded - stats_before.offloaded, kBlocks);
    EXPECT_EQ(stats.kept(), stats_before.kept());
    EXPECT_GE(stats.evicted_bytes, (kBlocks - 1) * tensor_bytes);
    EXPECT_LE(world_.device_bytes(), before + 2 * tensor_bytes);
  } else {
    EXPECT_EQ(world_.device_bytes(), before + (kBlocks + 1) * tensor_bytes);
  }
  y.sum().backward();
  if (GetParam()) {
    EXPECT_GE(world_.stats().fetched_bytes, (kBlocks - 1) * tensor_bytes);
    EXPECT_EQ(world_.stats().kept_in_backward, 0u) << "what is computed again is not offloaded";
  }
  y.reset();
  for (const Tensor& leaf : Leaves()) leaf.mutable_grad().reset();
  EXPECT_TRUE(Soon([&] { return world_.device_bytes() == before; }));
}

TEST_P(CheckpointTest, WhatABackwardDoesNotReadGoesWithIt) {
  Tensor used, unused;
  Forward([&] {
    std::tie(used, unused) = checkpoint(
        [this](const Tensor& x) {
          return std::pair(at::tanh(at::matmul(x, weights_[0])),
                           at::gelu(at::matmul(x, weights_[1])) * x);
        },
        at::tanh(x_));
    return used;
  });
  const uint64_t before = world_.device_bytes();
  torch::autograd::grad({used.sum()}, {weights_[0]}, {}, /*retain_graph=*/true);
  // The input may have been fetched from the host.
  EXPECT_TRUE(Soon([&] { return world_.device_bytes() <= before + used.nbytes(); }));
  torch::autograd::grad({unused.sum()}, {weights_[1]});
}

// The second run keeps no saved tensor whose handle is destroyed.
TEST_P(CheckpointTest, WhatNobodyCanReadIsNotKeptWhenItIsComputedAgain) {
  const auto bytes_behind = [this](bool has_other_output) {
    uint64_t bytes = 0;
    Tensor y = Forward([&] {
      const Tensor input = Probe(at::tanh(x_), {}, [&](const Tensor& gradient, const UnpackSaved&) {
        bytes = world_.device_bytes();
        return gradient;
      });
      const auto segment = [this, has_other_output](const Tensor& x) {
        const Tensor other = has_other_output ? at::tanh(at::gelu(at::matmul(x, weights_[0]))) : x;
        return std::pair(other, at::tanh(at::matmul(x, weights_[1])));
      };
      return checkpoint(segment, input).second;
    });
    torch::autograd::grad({y.sum()}, {x_});
    return bytes;
  };
  bytes_behind(false);  // sets the session up
  EXPECT_EQ(bytes_behind(true), bytes_behind(false));
}

TEST_P(CheckpointTest, BackwardLeavesRandomNumbersAsTheyWere) {
  SeedGenerators();
  const at::Generator& device = at::globalContext().defaultGenerator(world_.device());
  const at::Generator& cpu = at::globalContext().defaultGenerator(at::kCPU);
  Tensor y = Forward([this] {
    return checkpoint(
        [this](const Tensor& x) {
          return Block(x, 0) * at::rand({kSide}).to(world_.device());  // on the CPU
        },
        x_);
  });
  at::rand({3}).to(world_.device()).uniform_();  // what forward draws next
  const Tensor device_state = device.get_state(), cpu_state = cpu.get_state();
  y.sum().backward();
  EXPECT_EQ(runs_, 2);
  EXPECT_TRUE(SameBytes(device.get_state(), device_state));
  EXPECT_TRUE(SameBytes(cpu.get_state(), cpu_state));
}

TEST_P(CheckpointTest, AutocastOfForwardHoldsInBackward) {
  const auto forward = [this](bool checkpointed) {
    const AutocastRegion region(world_.device().type());
    return Blocks(checkpointed);
  };
  ExpectSameSteps([&] { return forward(false); }, [&] { return forward(true); });
  EXPECT_FALSE(at::autocast::is_autocast_enabled(world_.device().type()));
}

TEST_P(CheckpointTest, NestedSegmentsHaveTheBitsThatTheyHaveWithout) {
  const auto two = [this](bool checkpointed, size_t first) {
    return [this, checkpointed, first](const Tensor& x) {
      const auto inner = [this, first](const Tensor& in) { return Block(in, first); };
      return Block(checkpointed ? checkpoint(inner, x) : inner(x), first + 1);
    };
  };
  ExpectSameSteps([&] { return two(false, 2)(two(false, 0)(at::tanh(x_))); },
                  [&] { return checkpoint(two(true, 2), checkpoint(two(true, 0), at::tanh(x_))); });
}

// Such tensors are kept or offloaded, and never recomputed.
TEST_P(CheckpointTest, ScopesWithinASegmentKeepWhatIsSavedInThem) {
  const auto segment = [this](const Tensor& x) {
    Tensor y = Block(x, 0);
    {
      const NoOffloadScope kept;
      y = Block(y, 1);
    }
    {
      const OffloadScope offloaded(world_.session());
      y = Block(y, 2);
    }
    return Block(y, 3);
  };
  const OffloadStats before = world_.stats();
  ExpectSameSteps([&] { return segment(at::tanh(x_)); },
                  [&] { return checkpoint(segment, at::tanh(x_)); });
  EXPECT_GT(world_.stats().offloaded, before.offloaded);
}

TEST_P(CheckpointTest, ASegmentThatThrowsLeavesNothing) {
  const auto fails_at = [this](int run) {
    runs_ = 0;
    return Forward([this, run] {
      return checkpoint(
          [this, run](const Tensor& x) {
            const Tensor y = Block(Block(x, 0), 1);
            if (runs_ == run) throw std::runtime_error("this segment fails");
            return at::tanh(y);
          },
          at::tanh(x_));
    });
  };
  SeedGenerators();
  const auto fails = ThrowsMessage<std::runtime_error>(HasSubstr("this segment fails"));
  EXPECT_THAT([&] { fails_at(2); }, fails);
  world_.ExpectNothingLeft();
  Tensor y = fails_at(4);
  const at::Generator& device = at::globalContext().defaultGenerator(world_.device());
  const Tensor state = device.get_state();
  EXPECT_THAT([&] { y.sum().backward(); }, fails);
  EXPECT_TRUE(SameBytes(device.get_state(), state));
  y.reset();
  world_.ExpectNothingLeft();
  for (const Tensor& leaf : Leaves()) leaf.mutable_grad().reset();
  ExpectSameSteps([this] { return Blocks(false); }, [this] { return Blocks(true); });
}

TEST_P(CheckpointTest, ASegmentThatSwallowsTheEarlyStopKeepsItsBits) {
  const auto segment = [this](const Tensor& x) {
    Tensor y = at::tanh(at::matmul(x, weights_[0]));
    try {
      y = at::gelu(y);
    } catch (const std::exception&) {
      y = at::matmul(y, weights_[1]);
    }
    return y;
  };
  ExpectSameSteps([&] { return segment(at::tanh(x_)); },
                  [&] { return checkpoint(segment, at::tanh(x_)); });
}

TEST_P(CheckpointTest, AnInputThatIsChangedInPlaceIsAnError) {
  const Tensor input = at::tanh(x_);
  const Tensor y =
      Forward([&] { return checkpoint([this](const Tensor& x) { return Block(x, 0); }, input); });
  input.detach().add_(1);
  EXPECT_THAT([&] { y.sum().backward(); },
              ThrowsMessage<c10::Error>(HasSubstr("modified by an inplace operation")));
}

TEST_P(CheckpointTest, AnInputInsideOfAnotherValueIsSavedAsAnyOther) {
  const auto sums = [this](const std::vector<Tensor>& tensors,
                           const std::pair<std::optional<Tensor>, std::array<Tensor, 1>>& more) {
    return Block(tensors[0], 0) + Block(tensors[1], 1) * *more.first + more.second[0];
  };
  const auto forward = [&](bool checkpointed) {
    const std::vector<Tensor> tensors = {x_ + 1, x_ + 2};
    const std::pair more(std::optional(x_ + 3), std::array{x_ + 4});
    return checkpointed ? checkpoint(sums, tensors, more) : sums(tensors, more);
  };
  ExpectSameSteps([&] { return forward(false); }, [&] { return forward(true); });
  const OffloadStats before = world_.stats();
  Tensor y = Forward([&] { return forward(true); });
  EXPECT_EQ(world_.stats().offloaded - before.offloaded, GetParam() ? 4 : 0);
  const Tensor input = x_ + 5;
  const Tensor z = Forward([&] {
    return checkpoint(sums, std::vector<Tensor>{input, x_},
                      std::pair(std::optional(x_), std::array{x_}));
  });
  input.detach().add_(1);
  EXPECT_THAT([&] { z.sum().backward(); },
              ThrowsMessage<c10::Error>(HasSubstr("modified by an inplace operation")));
}

TEST_P(CheckpointTest, EachRunHasTheSegmentAsItWasBeforeForward) {
  const auto counting = [this, runs = 0](const Tensor& x) mutable {
    return Block(x, static_cast<size_t>(runs++));
  };
  ExpectSameSteps([&] { return Block(at::tanh(x_), 0); },
                  [&] { return checkpoint(counting, at::tanh(x_)); });
  const Tensor y = Forward([&] { return checkpoint(counting, at::tanh(x_)); }).sum();
  const Tensor first = torch::autograd::grad({y}, {x_}, {}, /*retain_graph=*/true)[0];
  EXPECT_TRUE(SameBytes(torch::autograd::grad({y}, {x_})[0], first));
}

TEST_P(CheckpointTest, ModulesAreCheckpointsInASequential) {
  torch::nn::Sequential plain, checkpointed;
  for (int i = 0; i < 3; ++i) {
    torch::nn::Linear linear(kSide, kSide);
    linear->to(world_.device());
    plain->push_back(linear);
    checkpointed->push_back(nn::Checkpoint(linear));
  }
  EXPECT_EQ(checkpointed->named_parameters().keys().front(), "0.module.weight");
  const auto gradients = [&](torch::nn::Sequential& model) {
    Tensor y = Forward([&] { return model->forward(at::tanh(x_)); });
    std::vector<Tensor> parameters = model->parameters();
    parameters.push_back(x_);
    return torch::autograd::grad({y.sum()}, parameters);
  };
  const auto expected = gradients(plain), actual = gradients(checkpointed);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(SameBytes(expected[i], actual[i]));
}

TEST_P(CheckpointTest, ASequentialOfThemCanBeCloned) {
  torch::nn::Sequential inner(torch::nn::Linear(kSide, kSide), torch::nn::GELU());
  torch::nn::Sequential model(nn::Checkpoint(inner), torch::nn::Linear(kSide, kSide));
  model->to(world_.device());
  const auto clone = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  EXPECT_EQ(clone->named_parameters().keys(), model->named_parameters().keys());
  EXPECT_EQ(clone->named_parameters().keys().front(), "0.module.0.weight");
  const auto gradients = [&](torch::nn::SequentialImpl& of) {
    const Tensor y = Forward([&] { return of.forward(at::tanh(x_)); });
    return torch::autograd::grad({y.sum()}, of.parameters());
  };
  const auto expected = gradients(*model);
  {
    const at::NoGradGuard no_grad;
    for (const Tensor& parameter : model->parameters()) parameter.zero_();
  }
  const auto actual = gradients(*clone);  // the clone has weights of its own
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(SameBytes(expected[i], actual[i]));
}

// The graph holds everything that the module's second run needs.
TEST_P(CheckpointTest, AModuleMayGoBeforeItsBackward) {
  Tensor y;
  {
    torch::nn::Linear linear(kSide, kSide);
    linear->to(world_.device());
    nn::Checkpoint module(std::move(linear));
    y = Forward([&] { return at::tanh(module->forward(at::tanh(x_))); });
  }
  y.sum().backward();
  EXPECT_TRUE(x_.grad().defined());
}

TEST(CheckpointSequentialTest, ASegmentLetsGoOfItsInput) {
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> input;
  const auto plain = [](const Tensor& x) { return at::tanh(x); };
  const auto notes_its_input = [&input](const Tensor& x) {
    input = x.storage().getWeakStorageImpl();
    return at::tanh(x);
  };
  const auto looks_for_it = [&input](const Tensor& x) {
    EXPECT_TRUE(input->expired());
    return at::tanh(x);
  };
  torch::nn::Sequential modules;
  for (const std::function<Tensor(Tensor)>& part :
       std::initializer_list<std::function<Tensor(Tensor)>>{plain, plain, notes_its_input,
                                                            looks_for_it, plain, plain}) {
    modules->push_back(torch::nn::Functional(part));
  }
  const SavedTensorsHooks keep_nothing([](const Tensor&) { return 0; },
                                       [](int) { return Tensor(); });
  checkpoint_sequential(modules, /*segments=*/3, at::rand({2}).requires_grad_(true));
  EXPECT_TRUE(input.has_value());
}

// Backward has read the last segment's input; it must be freed before the first segment runs again.
TEST(CheckpointSequentialTest, WhatOneSegmentHasReadIsGoneWhenTheNextOneRunsAgain) {
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> between;
  int runs = 0;
  const auto looks_for_it = [&](const Tensor& x) {
    if (++runs == 2) {
      EXPECT_TRUE(between->expired());
    }
    return at::tanh(x);
  };
  Tensor x = checkpoint(looks_for_it, at::rand({2}).requires_grad_(true));
  between = x.storage().getWeakStorageImpl();
  x = checkpoint([](const Tensor& in) { return in * in; }, std::move(x));
  x.sum().backward();
  EXPECT_EQ(runs, 2);
}

TEST(CheckpointSequentialTest, FewerSegmentsThanOneOrMoreThanModulesAreRefused) {
  torch::nn::Sequential modules(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  for (const int64_t segments : {INT64_MIN, int64_t{-1}, int64_t{0}, int64_t{3}}) {
    EXPECT_THROW(checkpoint_sequential(modules, segments, at::rand({2})), c10::Error);
  }
}

TEST_P(CheckpointTest, ARecordHasTheInputsAsObjectsAndTheSecondRunAsCompute) {
  // Work that saves nothing, so only compute grows.
  const auto segment = [this](const Tensor& x) {
    Tensor aside = x.detach();
    for (int i = 0; i < 100; ++i) aside = at::tanh(aside);
    return Block(x, 0);
  };
  const auto record = [&](bool checkpointed) {
    const auto recorder = StepRecorder::Create(world_.backend()).value();
    const Gradients left = Step([&] {
      const RecordScope scope(recorder);
      const Tensor x = at::tanh(x_);
      return checkpointed ? checkpoint(segment, checkpoint(segment, x)) : segment(segment(x));
    });
    return std::pair(left, recorder->Finish().value().at(world_.device().index()));
  };
  record(false);  // sets the session up
  const auto [expected, plain] = record(false);
  const auto [left, step] = record(true);
  ExpectSameGradients(expected, left);
  EXPECT_THAT(step.Validate(), IsOk());
  EXPECT_THAT(step.objects, SizeIs(2)) << "the inputs";
  EXPECT_GT(plain.objects.size(), 2u);
  for (const StepObject& object : step.objects) EXPECT_FALSE(object.recast_us.has_value());
  ASSERT_THAT(step.accesses, SizeIs(6)) << "the first input is tanh's output as well";
  if (!TestsRunOnGpu()) {  // which idles for the host in both
    EXPECT_GT(step.compute_us(), 1.5 * plain.compute_us());
  }
  // What the second run of a segment makes, when its input is back.
  EXPECT_GE(step.intervals[4].peak_other_bytes(), step.intervals[0].other_bytes + 2 * x_.nbytes());
}

// --- Several devices, threads and streams ---

// Tensors that a segment captures are no inputs, so the current device's generator is restored.
TEST_P(CheckpointTest, TensorsThatAreNoInputsHaveTheRandomNumbersOfForward) {
  const auto forward = [this](bool checkpointed) {
    const auto segment = [this, x = at::tanh(x_)] { return Block(x, 0); };
    return checkpointed ? checkpoint(segment) : segment();
  };
  ExpectSameSteps([&] { return forward(false); }, [&] { return forward(true); });
}

TEST_P(CheckpointTest, InputsOfOtherDevicesInContainersHaveTheRandomNumbersOfForward) {
  const Tensor weight = Weight(world_.device(1));
  const auto segment = [](const std::vector<std::optional<Tensor>>& tensors) {
    return at::tanh(at::dropout(at::tanh(*tensors[1]), 0.5, /*train=*/true));
  };
  const auto gradient = [&](bool checkpointed) {
    SeedGenerators();
    const std::vector<std::optional<Tensor>> inputs = {std::nullopt, weight};
    const Tensor y =
        Forward([&] { return checkpointed ? checkpoint(segment, inputs) : segment(inputs); });
    return torch::autograd::grad({y.sum()}, {weight})[0];
  };
  EXPECT_TRUE(SameBytes(gradient(true), gradient(false)));
}

// Like threads that reduce among themselves. A backward on the CPU runs on its caller's thread.
TEST(WaitForTensorTest, OneWithoutAStorageIsNoneOfTheAllocators) {
  const EmuWorld world;
  const c10::impl::VirtualGuardImpl guard(world.device().type());
  const Tensor sparse = at::eye(2).to_sparse();
  EXPECT_NO_THROW(WaitForTensor(sparse, guard.getStreamFromGlobalPool(world.device()),
                                guard.getStream(world.device())));
}

TEST(CheckpointThreadsTest, SegmentsWithoutRandomNumbersMayWaitForEachOther) {
  std::atomic<int> arrived = 0;
  const auto step = [&arrived] {
    int runs = 0;
    const auto segment = [&](const Tensor& x) {
      ++runs;
      ++arrived;
      EXPECT_TRUE(Soon([&] { return arrived >= 2 * runs; })) << "the other one does not run";
      return at::tanh(at::tanh(x));
    };
    const Tensor x = at::rand({2}).requires_grad_(true);
    checkpoint(CheckpointOptions{.preserve_rng_state = false}, segment, x).sum().backward();
  };
  std::thread other(step);
  step();
  other.join();
  EXPECT_EQ(arrived, 4);
}

// A segment that moves between devices and draws on both, without host synchronization.
struct TwoDevices {
  explicit TwoDevices(OffloadWorld& world)
      : first(world.device(0)),
        second(world.device(1)),
        w0(Weight(first)),
        w1(Weight(second)),
        x(Weight(first)) {}

  Tensor Segment(const Tensor& in, const Tensor& there) {
    ++runs;
    const Tensor y = at::dropout(at::tanh(at::matmul(in, w0)), 0.5, true);
    const Tensor z = at::tanh(at::matmul(at::tanh(y).to(second), w1)) * at::tanh(there);
    return at::tanh(at::dropout(z, 0.5, true));
  }
  Gradients Backward(const Tensor& y) {
    y.sum().backward();
    Gradients left = {.loss = y.detach().cpu(), .parameters = {}};
    for (const Tensor& leaf : {w0, w1, x}) {
      left.parameters.push_back(leaf.grad().cpu());
      leaf.mutable_grad().reset();
    }
    return left;
  }

  const c10::Device first, second;
  const Tensor w0, w1, x;
  int runs = 0;
};

TEST_P(CheckpointTest, ASegmentOfSeveralDevicesIsComputedAgainOnce) {
  TwoDevices both(world_);
  std::optional<Gradients> expected;
  for (const bool on_other_streams : {false, true}) {
    for (const bool checkpointed : {false, true}) {
      SCOPED_TRACE(::testing::Message() << on_other_streams << checkpointed);
      std::optional<c10::MultiStreamGuard> streams;
      SeedGenerators();
      both.runs = 0;
      const Tensor there = both.w1.detach() * 2;
      if (on_other_streams) {
        EXPECT_THAT(world_.Synchronize(0), IsOk());
        EXPECT_THAT(world_.Synchronize(1), IsOk());
        streams.emplace(std::vector<c10::Stream>{world_.NewStream(0), world_.NewStream(1)});
      }
      const Tensor y = Forward([&] {
        const auto segment = [&both](const Tensor& in, const Tensor& on_second) {
          return both.Segment(in, on_second);
        };
        const Tensor in = at::tanh(both.x), on_second = at::tanh(there);
        return checkpointed ? checkpoint(segment, in, on_second) : segment(in, on_second);
      });
      const Gradients left = both.Backward(y);
      EXPECT_EQ(both.runs, checkpointed ? 2 : 1);
      if (!expected.has_value()) expected = left;
      ExpectSameGradients(*expected, left);
      EXPECT_THAT(world_.Synchronize(0), IsOk());
      EXPECT_THAT(world_.Synchronize(1), IsOk());
    }
  }
}

// Both devices' workers recompute a segment at the same time, with the CPU's random numbers.
TEST_P(CheckpointTest, SegmentsOfSeveralDevicesDrawWhatTheyDrewInForward) {
  std::vector<Tensor> weights = {Weight(world_.device(0)), Weight(world_.device(1))};
  const auto step = [&](bool checkpointed) {
    SeedGenerators();
    std::vector<Tensor> roots;
    Forward([&] {
      for (const Tensor& weight : weights) {
        const auto segment = [&weight](const Tensor& in) {
          Tensor y = in;
          for (int i = 0; i < 4; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));  // lets the other worker run
            y = at::tanh(at::matmul(y, weight) * at::rand({kSide}).to(weight.device()));
          }
          return y;
        };
        const Tensor in = x_.detach().to(weight.device());
        roots.push_back((checkpointed ? checkpoint(segment, in) : segment(in)).sum());
      }
      return roots[0];
    });
    Gradients left = {.loss = at::rand({1}), .parameters = {}};
    const auto gradients = torch::autograd::grad(roots, weights);
    for (const Tensor& gradient : gradients) left.parameters.push_back(gradient.cpu());
    left.parameters.push_back(at::rand({4}));
    return left;
  };
  const Gradients expected = step(false);
  for (int i = 0; i < 5; ++i) ExpectSameGradients(expected, step(true));
}

}  // namespace checkpoint_test
}  // namespace pinion::testing
