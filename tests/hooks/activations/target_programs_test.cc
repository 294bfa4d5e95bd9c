// Checks a memory target in typical programs: optimizers with state, accumulated gradients, tensors
// made by the scope itself, backwards that bypass Pinion's engine. The emulated device refuses
// every byte above the target from the first step on.

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace target_programs_test {

constexpr int kSteps = 6;
constexpr int64_t kRows = 256;
constexpr int64_t kWidth = 64;

using at::Tensor;
using ::testing::HasSubstr;
using ::testing::Not;
using Tensors = std::vector<Tensor>;
// A step's forward inside the scope, and the backward from the loss.
using Forward = std::function<Tensor(const Tensor& x, const Tensors& weights)>;
using Backward = std::function<void(const Tensor& loss, const Tensors& weights, int step)>;
// The optimizer's state and its gradients stay from step to step.
using NewOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors&)>;

void CallBackward(const Tensor& loss, const Tensors&, int) { loss.backward(); }

struct Program {
  std::string name;
  Forward forward;
  Backward backward = CallBackward;
  NewOptimizer optimizer = nullptr;
  int steps_between_updates = 1;
  bool verify = false;
  Forward loss = nullptr;  // applied after the scope to forward's result; null: that is the loss
  bool scope_is_around_all = false;  // including backward
  std::function<void(const Tensor& x)> between_steps = nullptr;
  uint64_t targets = 6;            // between the least and all
  uint64_t scoped_steps = kSteps;  // a forward that is given up is a step as well
};

Tensor Layers(Tensor h, const Tensors& weights) {
  for (const Tensor& weight : weights) h = at::relu(h.mm(weight));
  return (h * h).mean();
}

Tensor Chain(const Tensor& x, const Tensors& weights) { return Layers(x, weights); }

Program Normalised() {
  return {"Normalised", [](const Tensor& x, const Tensors& weights) {
            return Layers((x - x.mean()) / x.std(), weights);
          }};
}
Program Augmented() {
  return {"Augmented", [](const Tensor& x, const Tensors& weights) {
            const Tensor noisy = x + at::randn_like(x) * 0.1;
            return Layers(noisy * at::rand_like(x), weights);
          }};
}
Program Masked() {
  return {"Masked", [](const Tensor& x, const Tensors& weights) {
            const Tensor mask = (at::rand_like(x) > 0.3).to(at::kFloat);
            Tensor h = x.mm(weights[0]) * mask;
            h = h.masked_fill(h > 0.5, 0.5);
            return Layers(h * mask, weights);
          }};
}
Program FrozenBackbone() {
  return {"FrozenBackbone", [](const Tensor& x, const Tensors& weights) {
            Tensor h = x;
            for (int i = 0; i < 3; ++i) h = at::tanh(h.mm(weights[i].detach()));
            return Layers(h, weights);
          }};
}
Program Indexed() {
  return {"Indexed", [](const Tensor& x, const Tensors& weights) {
            const Tensor order =
                at::randperm(kRows, at::TensorOptions(at::kCPU).dtype(at::kLong)).to(x.device());
            const Tensor h = x.mm(weights[0]).index_select(0, order);
            return Layers(h.gather(1, at::argsort(h.detach(), 1, false)), weights);
          }};
}
Program Views() {
  return {"Views", [](const Tensor& x, const Tensors& weights) {
            const Tensor h = x * 1.0;
            const Tensor y = at::group_norm(h.reshape({kRows, -1, 4, 4}), 1).reshape({kRows, -1});
            return Layers(y, weights) + (h.mm(weights[0]) * h).mean();
          }};
}
Program Momentum() {
  return {"Momentum", Chain, CallBackward, [](const Tensors& weights) {
            return std::make_unique<torch::optim::SGD>(
                weights, torch::optim::SGDOptions(1e-3).momentum(0.9));
          }};
}
std::unique_ptr<torch::optim::Optimizer> NewAdam(const Tensors& weights) {
  return std::make_unique<torch::optim::Adam>(weights, torch::optim::AdamOptions(1e-3));
}
Program Adam() { return {"Adam", Chain, CallBackward, NewAdam}; }
Program AdamW() {
  return {"AdamW", Normalised().forward, CallBackward, [](const Tensors& weights) {
            return std::make_unique<torch::optim::AdamW>(weights, torch::optim::AdamWOptions(1e-3));
          }};
}
Program Accumulated() { return {"Accumulated", Chain, CallBackward, NewAdam, 3}; }
// Several gradients arrive in one interval; the memory of first gradients adds up.
Program SeveralGradientsAtOnce() {
  return {"SeveralGradientsAtOnce",
          [](const Tensor& x, const Tensors& weights) {
            Tensor h = x;
            for (const Tensor& weight : weights) {
              h = at::tanh(h.mm(weight) + weight.repeat({kRows / kWidth, 1}));
            }
            return (h * h).mean();
          },
          CallBackward, NewAdam, 2};
}
Program NeverCleared() {
  return {"NeverCleared", Masked().forward, CallBackward, nullptr, kSteps + 1};
}
Program OnAnotherThread() {
  return {"OnAnotherThread", Chain, [](const Tensor& loss, const Tensors&, int) {
            std::thread([&loss] { loss.backward(); }).join();
          }};
}
Program ByGrad() {
  return {"ByGrad", Chain, [](const Tensor& loss, const Tensors& weights, int) {
            const auto gradients = torch::autograd::grad({loss}, weights);
            // LibTorch's worker keeps them until it is scheduled again.
            for (const Tensor& gradient : gradients) {
              EXPECT_TRUE(Soon([&gradient] { return gradient.use_count() == 1; }));
            }
            for (size_t i = 0; i < weights.size(); ++i) weights[i].mutable_grad() = gradients[i];
          }};
}
// Like Python's engine, which calls its base class.
Program ByTheBaseEngine() {
  return {"ByTheBaseEngine", Chain, [](const Tensor& loss, const Tensors&, int) {
            torch::autograd::Engine::get_base_engine().execute(
                {torch::autograd::impl::gradient_edge(loss)}, {at::ones_like(loss)},
                /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
          }};
}
Program Retained() {
  return {"Retained", Chain, [](const Tensor& loss, const Tensors&, int) {
            loss.backward({}, /*retain_graph=*/true);
            loss.backward();
          }};
}
// Adds the squared gradient of the last weight to the loss, so only tensors for that gradient stay.
void CallSecondOrder(const Tensor& loss, const Tensors& weights, int) {
  const Tensor gradient = torch::autograd::grad({loss}, {weights.back()}, {}, /*retain_graph=*/true,
                                                /*create_graph=*/true)[0];
  (loss + gradient.square().sum()).backward();
}
Program SecondOrder() { return {"SecondOrder", Chain, CallSecondOrder, NewAdam}; }
// Like regularisers that are applied in some steps only.
Program SecondOrderEverySecondStep() {
  return {"SecondOrderEverySecondStep", Chain,
          [](const Tensor& loss, const Tensors& weights, int step) {
            (step % 2 == 0 ? CallSecondOrder : CallBackward)(loss, weights, step);
          },
          NewAdam};
}
Program Verified() { return {"Verified", Chain, CallBackward, NewAdam, 1, /*verify=*/true}; }
// The loss needs more temporary memory than any layer, and saves nothing there.
Program LossBehindTheScope() {
  Program program = {"LossBehindTheScope", Chain, CallBackward, NewAdam};
  program.loss = [](const Tensor& y, const Tensors&) {
    Tensor zero;
    {
      const at::NoGradGuard no_grad;
      const Tensor wide = at::ones({kRows, 12 * kWidth}, y.options());
      zero = (wide.exp() * 0).sum();
    }
    return y + zero;
  };
  return program;
}

// Masks a gradient by temporaries that are larger than any layer's.
Tensor MaskedGradient(const Tensor& grad) {
  const at::NoGradGuard no_grad;
  const Tensor wide = at::ones({kRows, 12 * kWidth}, grad.options());
  return grad * (wide.exp() * 0).sum().add(0.5);
}
struct BeforeNode final : torch::autograd::FunctionPreHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    return {MaskedGradient(grads.front())};
  }
};
Program HookOnAnActivation() {
  return {"HookOnAnActivation",
          [](const Tensor& x, const Tensors& weights) {
            Tensor h = x;
            for (int i = 0; i < 5; ++i) h = at::relu(h.mm(weights[i]));
            h.register_hook(MaskedGradient);
            return Layers(h, {weights[5]});
          },
          CallBackward, NewAdam};
}
// Set behind the scope, on a leaf.
Program HookOnAWeight(std::string name, Backward backward) {
  return {std::move(name), Chain,
          [backward](const Tensor& loss, const Tensors& weights, int step) {
            const unsigned hook = weights[3].register_hook(MaskedGradient);
            backward(loss, weights, step);
            weights[3].remove_hook(hook);
          },
          NewAdam};
}
Program HookBeforeANode() {
  return {"HookBeforeANode",
          [](const Tensor& x, const Tensors& weights) {
            Tensor h = x;
            for (int i = 0; i < 5; ++i) h = at::relu(h.mm(weights[i]));
            h.grad_fn()->add_pre_hook(std::make_unique<BeforeNode>());
            return Layers(h, {weights[5]});
          },
          CallBackward, NewAdam};
}
Program HookWithinTheScope() {
  Program program = HookOnAWeight("HookWithinTheScope", CallBackward);
  program.scope_is_around_all = true;
  return program;
}

// In every second step, in the middle of the backward. The program drops the step.
Program AHookThrows() {
  return {"AHookThrows", Chain,
          [](const Tensor& loss, const Tensors& weights, int step) {
            if (step % 2 != 0) return loss.backward();
            const unsigned hook = weights[3].register_hook(
                [](const Tensor&) -> Tensor { throw std::runtime_error("not finite"); });
            EXPECT_ANY_THROW(loss.backward());
            weights[3].remove_hook(hook);
          },
          NewAdam};
}
// In every second step, after three layers. The program runs the forward again.
Program ALayerThrows() {
  Program program = {"ALayerThrows",
                     [calls = std::make_shared<int>()](const Tensor& x, const Tensors& weights) {
                       static_assert(kSteps % 2 == 0,
                                     "each run begins with an even number of calls");
                       const auto throws = [&] {
                         const Tensor y = Layers(x, {weights[0], weights[1], weights[2]});
                         throw std::runtime_error("not finite");
                       };
                       if (++*calls % 2 == 0) {
                         EXPECT_ANY_THROW(throws());
                       }
                       return Layers(x, weights);
                     },
                     CallBackward, NewAdam};
  program.scoped_steps = kSteps + kSteps / 2;
  return program;
}

// A scope around a whole step, and then an evaluation that allocates more than any target in total,
// but little at a time.
Program BackwardWithinTheScope() {
  Program program = {"BackwardWithinTheScope", Chain, CallBackward, NewAdam};
  program.scope_is_around_all = true;
  program.between_steps = [](const Tensor& x) {
    for (int i = 0; i < 64; ++i) at::ones_like(x);
  };
  return program;
}

// Each layer saves a small view of a tensor that nothing else saves, and has its peak when the view
// is copied.
Program SmallViews() {
  Program program = {"SmallViews",
                     [](const Tensor& x, const Tensors& weights) {
                       Tensor h = x;
                       Tensor sum = at::zeros({}, x.options());
                       for (const Tensor& weight : weights) {
                         h = h.mm(weight);
                         sum = sum + h.narrow(0, 0, kRows / 4).sin().sum();
                         const Tensor wide = at::ones({4 * kRows, kWidth}, x.options());
                         h = (h * 1.0).tanh();
                       }
                       return sum + h.sum();
                     },
                     CallBackward, NewAdam};
  program.targets = 48;
  return program;
}

struct Ran {
  uint64_t peak_bytes = 0;  // in forward and backward, the maximum over all steps
  Tensors values;           // the losses, and the weights after the last step
  OffloadStats stats;
};

class TargetPrograms : public ::testing::TestWithParam<Program> {
 protected:
  // Without `target_bytes`, runs without offload. With `is_limit` the device has no more.
  Ran Run(std::optional<uint64_t> target_bytes, bool is_limit) {
    OffloadOptions options = WithTarget(target_bytes.value_or(OffloadOptions::kAutoTarget));
    options.verify = GetParam().verify;
    EmuWorld world(MachineOptions(), options);
    torch::manual_seed(1);
    const Tensor x = at::randn({kRows, kWidth}).to(world.device());
    Tensors weights;
    for (int i = 0; i < 6; ++i) {
      weights.push_back((at::randn({kWidth, kWidth}) * 0.2).to(world.device()).requires_grad_());
    }
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (GetParam().optimizer) optimizer = GetParam().optimizer(weights);
    if (is_limit) {
      EXPECT_THAT(world.machine().SetMemoryLimit(0, *target_bytes), IsOk());
    }
    Ran ran;
    for (int step = 1; step <= kSteps; ++step) {
      world.ResetPeak();
      Tensor loss;
      std::optional<OffloadScope> scope;
      if (target_bytes.has_value()) scope.emplace(world.session());
      loss = GetParam().forward(x, weights);
      if (!GetParam().scope_is_around_all) scope.reset();
      if (GetParam().loss) loss = GetParam().loss(loss, weights);
      GetParam().backward(loss, weights, step);
      scope.reset();
      ran.values.push_back(loss.detach().to(at::kCPU));
      loss.reset();
      EXPECT_THAT(world.Synchronize(), IsOk());
      ran.peak_bytes = std::max(ran.peak_bytes, world.peak_device_bytes());
      if (GetParam().between_steps) GetParam().between_steps(x);
      if (step % GetParam().steps_between_updates != 0) continue;
      if (optimizer != nullptr) optimizer->step();
      for (const Tensor& weight : weights) weight.mutable_grad() = Tensor();
    }
    for (const Tensor& weight : weights) ran.values.push_back(weight.detach().to(at::kCPU));
    ran.stats = world.QuietStats();
    return ran;
  }

  void ExpectWithinEachTarget(bool is_limit);
};

void TargetPrograms::ExpectWithinEachTarget(bool is_limit) {
  const Ran plain = Run(std::nullopt, /*is_limit=*/false);
  const Ran least = Run(1, /*is_limit=*/false);
  ASSERT_LT(least.peak_bytes, plain.peak_bytes);
  EXPECT_EQ(least.stats.steps_over_target, GetParam().scoped_steps);
  EXPECT_EQ(least.stats.most_bytes_over_target, least.peak_bytes - 1);
  const uint64_t targets = GetParam().targets;
  for (uint64_t i = 0; i <= targets; ++i) {
    const uint64_t target_bytes =
        least.peak_bytes + (plain.peak_bytes - least.peak_bytes) * i / targets;
    SCOPED_TRACE(target_bytes);
    const CapturedLog log;
    const Ran ran = Run(target_bytes, is_limit);
    // Allocations after the step do not count.
    if (i > 0 && GetParam().scope_is_around_all) {
      EXPECT_THAT(log.text(), Not(HasSubstr("cannot be met")));
    }
    EXPECT_LE(ran.peak_bytes, target_bytes);
    EXPECT_EQ(ran.stats.steps_over_target, 0u);
    ASSERT_GT(ran.stats.evicted_bytes, 0u);
    ASSERT_GT(ran.stats.fetched_bytes, 0u);
    ASSERT_EQ(ran.values.size(), plain.values.size());
    for (size_t value = 0; value < plain.values.size(); ++value) {
      EXPECT_TRUE(at::equal(ran.values[value], plain.values[value])) << value;
    }
  }
}

TEST_P(TargetPrograms, KeepWithinEachTargetFromTheFirstStepOn) {
  ExpectWithinEachTarget(/*is_limit=*/true);
}

// The device refuses nothing, so that Pinion's own allocations must keep to the target, too.
TEST_P(TargetPrograms, KeepWithinEachTargetOnALargerDevice) {
  ExpectWithinEachTarget(/*is_limit=*/false);
}

INSTANTIATE_TEST_SUITE_P(
    Programs, TargetPrograms,
    ::testing::Values(Normalised(), Augmented(), Masked(), FrozenBackbone(), Indexed(), Views(),
                      Momentum(), Adam(), AdamW(), Accumulated(), SeveralGradientsAtOnce(),
                      NeverCleared(), OnAnotherThread(), SecondOrder(),
                      SecondOrderEverySecondStep(), ByGrad(), ByTheBaseEngine(), Retained(),
                      Verified(), LossBehindTheScope(), BackwardWithinTheScope(),
                      HookOnAnActivation(), HookBeforeANode(),
                      HookOnAWeight("HookOnAWeight", CallBackward),
                      HookOnAWeight("HookByGrad", ByGrad().backward),
                      HookOnAWeight("HookByTheBaseEngine", ByTheBaseEngine().backward),
                      HookWithinTheScope(), AHookThrows(), ALayerThrows(), SmallViews()),
    [](const auto& info) { return info.param.name; });

}  // namespace target_programs_test
}  // namespace pinion::testing
