// Checks where the recomputation of a segment stops: before a kernel, never while LibTorch saves a
// tensor. A saved tensor is as its operator's kernel leaves it, and custom functions run to their
// end. After the stop, destructors and handlers run operators as usual.

#include <ATen/Functions.h>
#include <ATen/SequenceNumber.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/checkpoint/checkpoint.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace early_stop_test {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Segment = std::function<Tensor(const Tensor&)>;

class EarlyStopTest : public ::testing::Test {
 protected:
  EarlyStopTest() {
    SeedGenerators();
    x_ = at::randn({4, 8, 16}).to(world_.device()).requires_grad_(true);
  }

  at::TensorOptions emu() { return {world_.device()}; }

  // Makes later allocations contain NaN, so that reads of uninitialized memory show.
  void Poison() {
    std::vector<Tensor> tensors;
    for (const int64_t items : {64, 512, 1024, 4096}) {
      for (int i = 0; i < 16; ++i) tensors.push_back(at::full({items}, NAN, emu()));
    }
  }

  Tensor GradientOf(const Segment& segment, bool checkpointed) {
    SeedGenerators();
    const Tensor in = x_ * 1;
    Tensor y = checkpointed ? checkpoint(segment, in) : segment(in);
    Poison();
    // Distinct factors per item, because a plain sum would hide wrong saved values.
    const Tensor factors = at::linspace(-1, 1, y.numel(), emu()).view(y.sizes());
    Tensor gradient = torch::autograd::grad({y}, {x_}, {factors})[0].cpu();
    return gradient;
  }

  void ExpectSameGradient(const Segment& segment) { ExpectSameGradient(segment, segment); }
  void ExpectSameGradient(const Segment& plain, const Segment& segment) {
    const Tensor expected = GradientOf(plain, /*checkpointed=*/false);
    EXPECT_TRUE(expected.isfinite().all().item<bool>()) << "the test's own operator";
    for (int step = 0; step < 2; ++step) {
      EXPECT_TRUE(SameBytes(GradientOf(segment, /*checkpointed=*/true), expected));
    }
  }

  // Expects all memory of a step to be freed, its gradient included.
  void ExpectNothingLeftBy(const std::function<void()>& step) {
    step();  // the first one sets things up
    const uint64_t before = LeastBytes();
    for (int i = 0; i < 3; ++i) {
      step();
      ASSERT_TRUE(Soon([&] { return world_.device_bytes() <= before; })) << "step " << i;
    }
  }
  // Returns the least bytes in use while autograd's workers release their tensors.
  uint64_t LeastBytes() {
    uint64_t least = world_.device_bytes();
    for (int i = 0; i < 20; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      least = std::min(least, world_.device_bytes());
    }
    return least;
  }

  OffloadWorld world_{EverySize(1)};
  Tensor x_;
};

// --- Operators ---

struct Operator {
  const char* name;
  Segment run;  // takes a (4, 8, 16) tensor
};

Tensor Square(const Tensor& x) { return x.reshape({8, 8, 8}) + 4 * at::eye(8, x.options()); }
Tensor Image(const Tensor& x) { return x.reshape({2, 4, 8, 8}); }
Tensor Rows(const Tensor& x) { return x.reshape({32, 16}); }
Tensor Classes(const Tensor& x) { return at::arange(32, x.options().dtype(at::kLong)) % 16; }
Tensor Zeros(const Tensor& x, int64_t count) { return at::zeros({count}, x.options()); }
Tensor Ones(const Tensor& x, int64_t count) { return at::ones({count}, x.options()); }

Tensor InPlace(const Tensor& x, void (*change)(Tensor& y)) {
  Tensor y = x * 1;
  change(y);
  return y;
}

// A program's own operator, x * cos(x), which saves its noise before its kernel fills it.
int noisy_kernels = 0;

Tensor NoisyKernel(const Tensor& x, const Tensor& noise) {
  ++noisy_kernels;
  noise.copy_(x.cos());
  return x * noise;
}

Tensor CallNoisy(const char* name, const Tensor& x, const Tensor& noise) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Tensor(const Tensor&, const Tensor&)>()
      .call(x, noise);
}

template <bool is_declared>
Tensor NoisyAutograd(const Tensor& x, const Tensor& noise) {
  const auto multiply = [](const Tensor& gradient, const UnpackSaved& unpack) {
    return gradient * unpack()[0];
  };
  return Probe(x, {noise}, multiply, [&] {
    return CallNoisy(is_declared ? "pinion_early_stop::noisy" : "pinion_early_stop::undeclared", x,
                     noise);
  });
}

TORCH_LIBRARY(pinion_early_stop, library) {
  library.def("noisy(Tensor x, Tensor(a!) noise) -> Tensor");
  library.def("undeclared(Tensor x, Tensor noise) -> Tensor");
  for (const char* const name : {"noisy", "undeclared"}) {
    library.impl(name, c10::DispatchKey::CompositeExplicitAutograd, &NoisyKernel);
  }
  library.impl("noisy", c10::DispatchKey::Autograd, &NoisyAutograd<true>);
  library.impl("undeclared", c10::DispatchKey::Autograd, &NoisyAutograd<false>);
}

// Operators that change a tensor after saving it: by filling, updating statistics or drawing.
std::vector<Operator> Operators() {
  return {
      {"a program's own",
       [](const Tensor& x) { return CallNoisy("pinion_early_stop::noisy", x, at::empty_like(x)); }},
      {"rrelu", [](const Tensor& x) { return at::rrelu(x, 0.1, 0.9, true); }},
      {"rrelu_",
       [](const Tensor& x) {
         return InPlace(x, [](Tensor& y) { at::rrelu_(y, 0.1, 0.9, true); });
       }},
      {"rrelu_with_noise",
       [](const Tensor& x) {
         Tensor noise = at::empty_like(x);
         return at::rrelu_with_noise(x, noise, 0.1, 0.9, true);
       }},
      {"instance_norm",
       [](const Tensor& x) {
         return at::instance_norm(x, {}, {}, Zeros(x, 8), Ones(x, 8), true, 0.1, 1e-5, false);
       }},
      {"batch_norm",
       [](const Tensor& x) {
         return at::batch_norm(x, Ones(x, 8), Zeros(x, 8), Zeros(x, 8), Ones(x, 8), true, 0.1, 1e-5,
                               false);
       }},
      {"batch_norm of evaluation",
       [](const Tensor& x) {
         return at::batch_norm(x, {}, {}, Zeros(x, 8), Ones(x, 8), false, 0.1, 1e-5, false);
       }},
      {"layer_norm", [](const Tensor& x) { return at::layer_norm(x, {16}, Ones(x, 16)); }},
      {"group_norm", [](const Tensor& x) { return at::group_norm(x, 2, Ones(x, 8)); }},
      {"dropout", [](const Tensor& x) { return at::dropout(x, 0.5, true); }},
      {"dropout_",
       [](const Tensor& x) { return InPlace(x, [](Tensor& y) { at::dropout_(y, 0.5, true); }); }},
      {"native_dropout",
       [](const Tensor& x) { return std::get<0>(at::native_dropout(x, 0.5, true)); }},
      {"feature_alpha_dropout",
       [](const Tensor& x) { return at::feature_alpha_dropout(x, 0.5, true); }},
      {"max_pool2d",
       [](const Tensor& x) {
         return at::max_pool2d(Image(x), {2, 2});
       }},
      {"adaptive_max_pool2d",
       [](const Tensor& x) {
         return std::get<0>(at::adaptive_max_pool2d(Image(x), {3, 3}));
       }},
      {"fractional_max_pool2d",
       [](const Tensor& x) {
         return std::get<0>(
             at::fractional_max_pool2d(Image(x), {2, 2}, {3, 3}, at::rand({2, 4, 2}, x.options())));
       }},
      {"conv2d",
       [](const Tensor& x) {
         return at::conv2d(Image(x), at::ones({3, 4, 3, 3}, x.options()));
       }},
      {"grid_sampler",
       [](const Tensor& x) {
         return at::grid_sampler(Image(x), Image(x).slice(1, 0, 2).permute({0, 2, 3, 1}).tanh(), 0,
                                 0, false);
       }},
      {"matmul", [](const Tensor& x) { return at::matmul(x, x.transpose(1, 2)); }},
      {"linear",
       [](const Tensor& x) {
         return at::linear(x, at::ones({3, 16}, x.options()));
       }},
      {"addmm",
       [](const Tensor& x) { return at::addmm(Rows(x), Rows(x), at::eye(16, x.options())); }},
      {"scaled_dot_product_attention",
       [](const Tensor& x) {
         return at::scaled_dot_product_attention(Image(x), Image(x) + 1, Image(x) - 1, {}, 0.25);
       }},
      {"softmax", [](const Tensor& x) { return at::softmax(x, -1); }},
      {"log_softmax", [](const Tensor& x) { return at::log_softmax(x, -1); }},
      {"cross_entropy_loss",
       [](const Tensor& x) { return at::cross_entropy_loss(Rows(x), Classes(x)); }},
      {"nll_loss", [](const Tensor& x) { return at::nll_loss(Rows(x), Classes(x)); }},
      {"multilabel_margin_loss",
       [](const Tensor& x) {
         return at::multilabel_margin_loss(Rows(x),
                                           at::zeros({32, 16}, x.options().dtype(at::kLong)));
       }},
      {"embedding_bag",
       [](const Tensor& x) {
         return std::get<0>(at::embedding_bag(Rows(x), Classes(x),
                                              at::arange(0, 32, 4, x.options().dtype(at::kLong))));
       }},
      {"cumprod", [](const Tensor& x) { return at::cumprod(x + 2, 1); }},
      {"prod", [](const Tensor& x) { return at::prod(x + 2, 1); }},
      {"std", [](const Tensor& x) { return at::std(x, -1); }},
      {"norm", [](const Tensor& x) { return at::norm(x, 2, {1}, false); }},
      {"logsumexp", [](const Tensor& x) { return at::logsumexp(x, 1); }},
      {"sort", [](const Tensor& x) { return std::get<0>(at::sort(x, 1)); }},
      {"topk", [](const Tensor& x) { return std::get<0>(at::topk(x, 3)); }},
      {"median", [](const Tensor& x) { return std::get<0>(at::median(x, 1)); }},
      {"cummax", [](const Tensor& x) { return std::get<0>(at::cummax(x, 1)); }},
      {"svd", [](const Tensor& x) { return std::get<1>(at::linalg_svd(Square(x))); }},
      {"qr", [](const Tensor& x) { return std::get<1>(at::linalg_qr(Square(x))); }},
      {"inverse", [](const Tensor& x) { return at::linalg_inv(Square(x)); }},
      {"relu_", [](const Tensor& x) { return (x * 1).relu_(); }},
      {"tanh_", [](const Tensor& x) { return (x * 1).tanh_(); }},
      {"exp_", [](const Tensor& x) { return (x * 1).exp_(); }},
      {"mul_", [](const Tensor& x) { return (x * 1).mul_(x.cos()); }},
      {"div", [](const Tensor& x) { return x / (x.cos() + 2); }},
      {"prelu", [](const Tensor& x) { return at::prelu(x, Ones(x, 8) / 4); }},
      {"gelu", [](const Tensor& x) { return at::gelu(x); }},
      {"masked_select", [](const Tensor& x) { return at::masked_select(x, x > 0); }},
      {"index_put_",
       [](const Tensor& x) {
         return (Rows(x) * 1).index_put_({Classes(x).slice(0, 0, 4)}, Rows(x)[0].exp());
       }},
      {"lstm",
       [](const Tensor& x) {
         const auto weight = [&x](int64_t rows, int64_t columns) {
           return at::linspace(-1, 1, rows * columns, x.options()).view({rows, columns});
         };
         const std::vector<Tensor> state = {at::zeros({1, 8, 4}, x.options()),
                                            at::zeros({1, 8, 4}, x.options())};
         const std::vector<Tensor> weights = {weight(16, 16), weight(16, 4)};
         return std::get<0>(at::lstm(x, state, weights, /*has_biases=*/false, /*num_layers=*/1,
                                     /*dropout=*/0, /*train=*/true, /*bidirectional=*/false,
                                     /*batch_first=*/false));
       }},
  };
}

using EarlyStopOperators = EarlyStopTest;

// The operator's saved tensor is the last one that the segment saves.
TEST_F(EarlyStopOperators, EachHasRunToItsEndAndNothingBehindItRuns) {
  for (const Operator& op : Operators()) {
    SCOPED_TRACE(op.name);
    int behind = 0;
    const auto segment = [&](const Tensor& x) {
      Tensor y = op.run(x.sin()) + 1;
      ++behind;
      return y;
    };
    ExpectSameGradient(segment);
    EXPECT_EQ(behind, 3) << "once in each forward, never when it is computed again";
  }
}

TEST_F(EarlyStopOperators, EachHasRunToItsEndWhereInputsAreOffloaded) {
  for (const Operator& op : Operators()) {
    SCOPED_TRACE(op.name);
    const auto segment = [&](const Tensor& x) { return op.run(x.sin()); };
    const Tensor expected = GradientOf(segment, /*checkpointed=*/false);
    SeedGenerators();
    const OffloadStats before = world_.stats();
    Tensor y;
    {
      const OffloadScope scope(world_.session());
      y = checkpoint(segment, x_ * 1);
    }
    EXPECT_GT(world_.stats().offloaded, before.offloaded);
    EXPECT_GT(world_.stats().evicted_bytes, before.evicted_bytes);
    Poison();
    const Tensor factors = at::linspace(-1, 1, y.numel(), emu()).view(y.sizes());
    EXPECT_TRUE(SameBytes(torch::autograd::grad({y}, {x_}, {factors})[0].cpu(), expected));
    EXPECT_GT(world_.stats().fetched_bytes, before.fetched_bytes);
  }
}

// The operator is in a segment that is inside another one.
TEST_F(EarlyStopOperators, EachHasRunToItsEndInNestedSegments) {
  for (const Operator& op : Operators()) {
    SCOPED_TRACE(op.name);
    const auto inner = [&](const Tensor& in) { return op.run(in.sin()); };
    ExpectSameGradient([&](const Tensor& x) { return inner(x.cos()); },
                       [&](const Tensor& x) { return checkpoint(inner, x.cos()); });
  }
}

bool DeclaresAWrite(const c10::FunctionSchema& op) {
  return std::any_of(op.arguments().begin(), op.arguments().end(),
                     [](const c10::Argument& argument) {
                       return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
                     });
}

// Returns whether LibTorch's naming rules promise a write: add_, sum.out.
bool HasTheNameOfAWrite(const c10::OperatorName& name) {
  return (name.name.ends_with('_') && !name.name.ends_with("__")) || name.overload_name == "out" ||
         name.overload_name.ends_with("_out");
}

TEST_F(EarlyStopOperators, EachOneOfLibTorchsTableThatWritesDeclaresIt) {
  int writing = 0;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const std::optional<c10::OperatorHandle> op = dispatcher.findSchema(name);
    if (!op.has_value()) continue;
    const bool writes = DeclaresAWrite(op->schema());
    EXPECT_EQ(op->schema().is_mutable(), writes) << name;
    writing += writes ? 1 : 0;
    // c10d's collectives do not declare their writes.
    const bool is_atens = name.name.starts_with("aten::");
    EXPECT_TRUE(writes || !is_atens || !HasTheNameOfAWrite(name)) << name;
  }
  EXPECT_GT(writing, 1000);
}

TEST_F(EarlyStopOperators, OneThatDeclaresAWriteRunsItsKernelBehindItsSave) {
  const auto stops_at = [](const char* name) {
    try {
      BeforeKernel(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").schema());
    } catch (const std::exception&) {
      return true;
    }
    return false;
  };
  for (const bool writes : {true, false}) {
    for (const bool has_returned : {true, false}) {
      int runs = 0;
      const auto segment = [&](const Tensor& x) {
        const Tensor in = x.sin();
        const auto double_it = [](const Tensor& gradient, const UnpackSaved&) {
          return gradient * 2;
        };
        Tensor y = Probe(in, {in}, double_it, [&] {
          if (++runs == 2) {                                             // in the recomputation
            if (has_returned) at::sequence_number::get_and_increment();  // the next one has a node
            EXPECT_EQ(
                stops_at(writes ? "pinion_early_stop::noisy" : "pinion_early_stop::undeclared"),
                has_returned || !writes);
          }
          return in * 2;
        });
        return y;
      };
      GradientOf(segment, /*checkpointed=*/true);
      EXPECT_EQ(runs, 2);
    }
  }
}

// The early stop trusts schemas, as LibTorch's own graph passes do.
TEST_F(EarlyStopOperators, AWriteThatASchemaDoesNotDeclareIsNotMade) {
  for (const bool is_declared : {true, false}) {
    const char* const name =
        is_declared ? "pinion_early_stop::noisy" : "pinion_early_stop::undeclared";
    noisy_kernels = 0;
    GradientOf([&](const Tensor& x) { return CallNoisy(name, x.sin(), at::zeros_like(x)); },
               /*checkpointed=*/true);
    EXPECT_EQ(noisy_kernels, is_declared ? 2 : 1) << "in forward, and when it is computed again";
  }
}

// --- Custom functions ---

// Saves its "input", its "output", an "other" tensor made in forward, or two "outputs".
struct Saver : torch::autograd::Function<Saver> {
  static variable_list forward(AutogradContext* context, const Tensor& x, const std::string& what) {
    Tensor y = x.tanh(), other = x.cos();
    context->saved_data["what"] = what;
    if (what == "input") context->save_for_backward({x});
    if (what == "output") context->save_for_backward({y});
    if (what == "other") context->save_for_backward({1 - y * y});
    if (what == "all") context->save_for_backward({x, y, other});
    if (what == "outputs") context->save_for_backward({y, other});
    if (what == "outputs") return {y, other};
    return {y};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::string what = context->saved_data["what"].toStringRef();
    const variable_list saved = context->get_saved_variables();
    Tensor slope = saved[0];
    if (what == "input") slope = 1 - slope.tanh().square();
    if (what == "output" || what == "outputs") slope = 1 - slope * slope;
    if (what == "all") slope = 1 - saved[1] * saved[1];
    return {gradients[0] * slope, Tensor()};
  }
};

using EarlyStopFunctions = EarlyStopTest;

const std::vector<std::string>& Saves() {
  static const auto* saves =
      new std::vector<std::string>{"input", "output", "other", "all", "outputs"};
  return *saves;
}

TEST_F(EarlyStopFunctions, ThoseThatSaveLastLeaveNothing) {
  for (const std::string& what : Saves()) {
    SCOPED_TRACE(what);
    const auto segment = [&](const Tensor& x) { return Saver::apply(x.sin(), what)[0]; };
    ExpectSameGradient(segment);
    ExpectNothingLeftBy([&] { GradientOf(segment, /*checkpointed=*/true); });
  }
}

TEST_F(EarlyStopFunctions, ThoseThatSaveLastAreFollowedByNoOperator) {
  int after_function = 0, after_operator = 0;
  ExpectSameGradient([&](const Tensor& x) {
    Tensor y = Saver::apply(x.sin(), "output")[0];
    ++after_function;
    y = y + 1;
    ++after_operator;
    return y;
  });
  EXPECT_EQ(after_function, 5) << "there is no operator to stop at";
  EXPECT_EQ(after_operator, 3);
}

// A custom function with a graph of its own, to which the last saved tensor belongs.
struct InnerGraph : torch::autograd::Function<InnerGraph> {
  static Tensor forward(AutogradContext* context, const Tensor& x) {
    const at::AutoGradMode grad(true);
    const Tensor in = x.detach().requires_grad_(true);
    Tensor y = in.tanh();
    context->saved_data["slope"] = torch::autograd::grad({y.sum()}, {in})[0];
    return y.detach();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {gradients[0] * context->saved_data["slope"].toTensor()};
  }
};

TEST_F(EarlyStopFunctions, OneWithAGraphOfItsOwnLeavesNothing) {
  const auto segment = [](const Tensor& x) { return InnerGraph::apply(x.sin()); };
  ExpectSameGradient(segment);
  ExpectNothingLeftBy([&] { GradientOf(segment, /*checkpointed=*/true); });
}

// A function that saves its output would keep itself alive if it were stopped halfway.
TEST_F(EarlyStopFunctions, ASegmentThatSavesMoreThanInForwardIsAnErrorThatLeavesNothing) {
  ExpectNothingLeftBy([&] {
    int runs = 0;
    const auto segment = [&runs](const Tensor& x) {
      Tensor y = x.tanh();
      return ++runs == 1 ? y : Saver::apply(y, "output")[0];
    };
    const Tensor y = checkpoint(CheckpointOptions{.early_stop = false}, segment, x_ * 1).sum();
    EXPECT_THAT([&] { torch::autograd::grad({y}, {x_}); },
                ThrowsMessage<c10::Error>(HasSubstr("saves more tensors")));
  });
}

// --- What the segment does beside ---

// Memory runs out in the operator that has just saved the last required tensor.
TEST_F(EarlyStopTest, AnOperatorThatFailsBehindItsLastSaveIsAnError) {
  Tensor y = checkpoint([](const Tensor& x) { return at::rrelu(x.sin(), 0.1, 0.9, true); }, x_ * 1);
  const Tensor gradient = at::ones_like(y);
  world_.LeaveRoom(2 * x_.nbytes());  // for sine and noise, not for the result
  EXPECT_THROW(torch::autograd::grad({y}, {x_}, {gradient}), c10::OutOfMemoryError);
}

// The outer segment needs nothing after the inner segment's inputs.
TEST_F(EarlyStopTest, AnInnerSegmentWhoseInputsAreTheLastThatIsNeededDoesNotRun) {
  int inner_runs = 0, outer_runs = 0;
  const auto inner = [&](const Tensor& in) {
    ++inner_runs;
    return in.tanh();
  };
  ExpectSameGradient([](const Tensor& x) { return x.sin().tanh(); },
                     [&](const Tensor& x) {
                       ++outer_runs;
                       return checkpoint(inner, x.sin());
                     });
  EXPECT_EQ(outer_runs, 2 * 2);
  EXPECT_EQ(inner_runs, 2 * 2) << "in forward, and for its own saved tensors";
}

// The operators of a backward inside the segment run on one of the device's workers.
TEST_F(EarlyStopTest, AnOperatorOfABackwardWithinTheSegmentMayBeTheLast) {
  ExpectSameGradient([](const Tensor& x) {
    const Tensor in = x.sin();
    const Tensor y = (in * in.tanh()).sum();
    return torch::autograd::grad({y}, {in}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  });
}

TEST_F(EarlyStopTest, ARetainedGraphStopsInEachBackward) {
  int returned = 0;
  Tensor y = checkpoint(
      [&](const Tensor& x) {
        Tensor noisy = at::rrelu(x.sin(), 0.1, 0.9, true) + 1;
        ++returned;
        return noisy;
      },
      x_ * 1);
  const Tensor gradient = at::ones_like(y);
  const auto backward = [&] {
    Poison();
    return torch::autograd::grad({y}, {x_}, {gradient}, /*retain_graph=*/true)[0].cpu();
  };
  const Tensor expected = backward();
  EXPECT_TRUE(expected.isfinite().all().item<bool>());
  EXPECT_TRUE(SameBytes(backward(), expected));
  EXPECT_EQ(returned, 1);
}

// --- Destructors and handlers ---

class EarlyStopUnwinding : public EarlyStopTest {
 protected:
  void Count() {
    const at::NoGradGuard no_grad;
    count_.add_(1);
  }
  int64_t TakeCount() { return static_cast<int64_t>(std::exchange(count_, Zero()).item<float>()); }
  Tensor Zero() { return at::zeros({}, emu()); }

  Tensor count_ = Zero();
};

constexpr int kRuns = 5;   // of a segment in ExpectSameGradient
constexpr int kStops = 2;  // of a segment there

// Segments whose recomputation stops in an operator, and segments that end before the next one.
std::vector<Operator> Endings() {
  return {
      {"before an operator",
       [](const Tensor& x) { return x + at::dropout(x.tanh(), 0.1, /*train=*/true); }},
      {"behind a saved input", [](const Tensor& x) { return x.sin(); }},
      {"behind a saved output", [](const Tensor& x) { return x.tanh(); }},
      {"behind a custom function", [](const Tensor& x) { return Saver::apply(x, "output")[0]; }},
      {"in a backward",
       [](const Tensor& x) {
         const Tensor in = x.sin();
         const Tensor y = (in * in.tanh()).sum();
         return torch::autograd::grad({y}, {in}, {}, /*retain_graph=*/true,
                                      /*create_graph=*/true)[0];
       }},
      {"in a nested segment",
       [](const Tensor& x) {
         return checkpoint([](const Tensor& in) { return in.tanh() + 1; }, x.sin());
       }},
  };
}

TEST_F(EarlyStopUnwinding, DestructorsRunTheirOperators) {
  struct Destructor {
    const char* name;
    std::function<void(const Tensor& x)> run;
  };
  const std::vector<Destructor> destructors = {
      {"without gradients", [](const Tensor&) {}},
      {"of a tensor without history", [](const Tensor& x) { x.detach().norm().item(); }},
      {"that save tensors", [](const Tensor& x) { x.norm().item(); }},
  };
  for (const Operator& ending : Endings()) {
    for (const Destructor& destructor : destructors) {
      SCOPED_TRACE(std::string(ending.name) + ", " + destructor.name);
      int runs = 0;
      ExpectSameGradient([&](const Tensor& x) {
        ++runs;
        const absl::Cleanup count = [&] {
          destructor.run(x);
          Count();
        };
        return ending.run(x);
      });
      EXPECT_EQ(TakeCount(), runs);
    }
  }
}

TEST_F(EarlyStopUnwinding, DestructorsOfNestedSegmentsRunTheirOperators) {
  const auto guarded = [&](const Segment& run) {
    return [this, run](const Tensor& x) {
      const absl::Cleanup count = [this] { Count(); };
      return run(x);
    };
  };
  const auto inner = guarded([](const Tensor& x) { return x + x.tanh(); });
  ExpectSameGradient(guarded([&](const Tensor& x) { return inner(x.cos()) + 1; }),
                     guarded([&](const Tensor& x) { return checkpoint(inner, x.cos()) + 1; }));
  EXPECT_EQ(TakeCount(), 2 + 2 * 4) << "the outer segment stops before it runs the inner one again";
}

TEST_F(EarlyStopUnwinding, WhatADestructorSavesIsNotTheSegments) {
  int unwound = 0;
  const auto step = [&] {
    ExpectSameGradient([&](const Tensor& x) {
      const int exceptions = std::uncaught_exceptions();
      const absl::Cleanup differentiate = [&] {
        if (std::uncaught_exceptions() == exceptions) return;
        ++unwound;
        const at::AutoGradMode grad(true);
        const Tensor in = x.detach().requires_grad_(true);
        const Tensor slope = torch::autograd::grad({in.sin().sum()}, {in})[0];
        EXPECT_TRUE(at::allclose(slope.cpu(), x.detach().cos().cpu()));
      };
      return x.tanh() + 1;
    });
  };
  step();
  EXPECT_EQ(unwound, kStops);
  ExpectNothingLeftBy(step);
}

TEST_F(EarlyStopUnwinding, AnErrorOfTheSegmentsOwnIsNotStopped) {
  ExpectSameGradient([this](const Tensor& x) {
    const Tensor y = x.tanh();
    try {
      const absl::Cleanup count = [&] {
        y.mean();
        Count();
      };
      throw std::runtime_error("the segment's own");
    } catch (const std::runtime_error&) {
      return y + 1;
    }
  });
  EXPECT_EQ(TakeCount(), kRuns);
}

TEST_F(EarlyStopUnwinding, ARangeOfTheProfilerIsLeft) {
  const auto call = [](const char* name, const char* overload, torch::jit::Stack* stack) {
    c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).callBoxed(stack);
  };
  int left = 0;
  ExpectSameGradient([&](const Tensor& x) {
    torch::jit::Stack range = {"range", c10::IValue()};
    call("profiler::_record_function_enter_new", "", &range);
    const absl::Cleanup leave = [&] {
      call("profiler::_record_function_exit", "_RecordFunction", &range);
      ++left;
    };
    return x.tanh() + 1;
  });
  EXPECT_EQ(left, kRuns);
}

TEST_F(EarlyStopUnwinding, AHandlerThatThrowsAgainRunsItsOperators) {
  ExpectSameGradient([this](const Tensor& x) {
    const Tensor y = x.tanh();
    try {
      return y + 1;
    } catch (...) {
      Count();
      throw;
    }
  });
  EXPECT_EQ(TakeCount(), kStops);
}

TEST_F(EarlyStopUnwinding, AHandlerThatSwallowsTheStopRunsItsFallback) {
  ExpectSameGradient([this](const Tensor& x) {
    const Tensor y = x.tanh();
    try {
      return y + 1;
    } catch (const std::exception&) {
      Count();
      return y.tanh() * 2;
    }
  });
  EXPECT_EQ(TakeCount(), kStops);
}

TEST_F(EarlyStopUnwinding, ASecondTryRunsToItsEnd) {
  int tries = 0;
  ExpectSameGradient([&](const Tensor& x) {
    const Tensor y = x.tanh();
    for (;;) {
      try {
        ++tries;
        return checkpoint([](const Tensor& in) { return in.tanh() + 1; }, y);
      } catch (...) {
      }
    }
  });
  EXPECT_EQ(tries, kRuns + kStops);
}

// An interpreter turns the stop into an error of its own.
TEST_F(EarlyStopUnwinding, AnErrorThatReplacesTheStopIsNone) {
  ExpectSameGradient([](const Tensor& x) {
    const Tensor y = x.tanh();
    try {
      return y + 1;
    } catch (const std::exception& error) {
      throw std::runtime_error(error.what());
    }
  });
}

TEST_F(EarlyStopUnwinding, AHandlerThatChangesASavedTensorIsAnError) {
  const auto segment = [](const Tensor& x) {
    const Tensor y = x.tanh();
    try {
      return y + 1;
    } catch (...) {
      const at::NoGradGuard no_grad;
      y.zero_();
      throw;
    }
  };
  EXPECT_THAT([&] { GradientOf(segment, /*checkpointed=*/true); },
              ThrowsMessage<c10::Error>(HasSubstr("modified by an inplace operation")));
}

}  // namespace early_stop_test
}  // namespace pinion::testing
