// Compares pinion::checkpoint with torch.utils.checkpoint on the cases of torch_checkpoint.py,
// written in C++. If Python has torch with the same kernels, values must be equal bit by bit. The
// values in torch_checkpoint.json may come from other kernels.

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "pinion/hooks/checkpoint/checkpoint.h"
#include "pinion/hooks/checkpoint/checkpoint_module.h"
#include "pinion/hooks/checkpoint/saved_tensors_hooks.h"
#include "pinion/tests/hooks/support/autocast_region.h"
#include "pinion/tests/support/python_with_torch.h"
#include "pinion/tests/support/run_program.h"

namespace pinion::testing {
namespace torch_checkpoint_test {

using at::Tensor;

constexpr int64_t kSide = 4;

// Words shared by Pinion's messages and those of torch.utils.checkpoint in torch_checkpoint.py.
const std::vector<std::pair<std::string, std::string>>& Errors() {
  static const auto* errors = new std::vector<std::pair<std::string, std::string>>{
      {"different number of tensors", "number"},
      {"have different metadata", "metadata"},
      {"saves more tensors", "more"},
      {"for the second time in one backward", "read twice"},
      {"modified by an inplace operation", "changed in place"},
      {"this part fails", "failed"},
  };
  return *errors;
}

struct Case {
  explicit Case(at::ScalarType type) : dtype(type) {
    int64_t seed = 1;
    for (Tensor* leaf : {&x, &w0, &w1, &w2}) *leaf = Make(seed++).requires_grad_(true);
  }

  Tensor Make(int64_t seed) const {
    const Tensor numbers = at::arange(kSide * kSide) * 7 + seed * 5;
    return (at::remainder(numbers, 11) - 5).to(dtype).div(8).view({kSide, kSide});
  }

  int Run(const std::string& part) { return ++ran[part]; }

  std::function<Tensor(const Tensor&)> Segment() {
    return [this](const Tensor& in) {
      Run("begin");
      Tensor y = at::sin(at::matmul(at::tanh(at::matmul(in, w0)), w1));
      Run("end");
      return y;
    };
  }

  void Backward(const Tensor& y, bool retain_graph = false) {
    values.push_back(y);
    (y * y).sum().backward({}, retain_graph);
  }

  at::ScalarType dtype;
  Tensor x, w0, w1, w2;
  std::vector<Tensor> values;
  std::map<std::string, int> ran;
};

constexpr CheckpointOptions kNoEarlyStop = {.early_stop = false};
constexpr CheckpointOptions kUnchecked = {.determinism_check = DeterminismCheck::kNone};

Tensor Outer(Case& c, const Tensor& x, const CheckpointOptions& options = {}) {
  c.Run("outer");
  const Tensor y = checkpoint(options, c.Segment(), at::tanh(at::matmul(x, c.w2)));
  c.Run("outer end");
  return at::cos(at::matmul(y, c.w0));
}

void Nested(Case& c, const CheckpointOptions& options = {}) {
  c.Backward(checkpoint(
      options, [&](const Tensor& x) { return Outer(c, x, options); }, c.x));
}

void NestedThreeDeep(Case& c) {
  const auto outermost = [&c](const Tensor& x) {
    c.Run("outermost");
    return checkpoint([&c](const Tensor& in) { return Outer(c, in); }, at::matmul(x, c.w1)).tanh();
  };
  c.Backward(checkpoint(outermost, c.x));
}

void OtherInputs(Case& c) {
  const auto scaled = [&c](const Tensor& x, double scale, const Tensor& mask) {
    c.Run("begin");
    return at::tanh(at::matmul(x, c.w0)).masked_fill(mask, 0.5) * scale;
  };
  c.Backward(checkpoint(scaled, c.x, 0.75, c.Make(3) > 0));
}

void TwoOutputs(Case& c) {
  const auto two = [&c](const Tensor& x) {
    c.Run("begin");
    return std::pair(at::tanh(at::matmul(x, c.w0)), at::sin(at::matmul(x, c.w1)));
  };
  const auto [first, second] = checkpoint(two, c.x);
  c.Backward(first, /*retain_graph=*/true);
  c.Backward(second);
}

void Drops(Case& c, const CheckpointOptions& options) {
  const auto drop = [&c](const Tensor& x) {
    c.Run("begin");
    return at::matmul(at::dropout(at::tanh(at::matmul(x, c.w0)), 0.5, true), c.w1);
  };
  at::manual_seed(7);
  const Tensor y = checkpoint(options, drop, at::dropout(c.x, 0.25, true));
  c.Backward(at::dropout(y, 0.25, true));
  c.values.push_back(at::rand({3}, at::TensorOptions(c.dtype)));
}

void Autocast(Case& c) {
  Tensor y;
  {
    const AutocastRegion region(at::kCPU);
    y = checkpoint(c.Segment(), c.x);
  }
  c.Backward(y.to(c.dtype));
}

void AutocastInBackwardOnly(Case& c) {
  const Tensor y = checkpoint(c.Segment(), c.x);
  const AutocastRegion region(at::kCPU);
  c.Backward(y);
}

void RetainGraph(Case& c) {
  const Tensor y = checkpoint(c.Segment(), c.x);
  c.Backward(y, /*retain_graph=*/true);
  c.Backward(y);
}

using Function = std::function<Tensor(const Tensor&)>;

void DoubleBackward(Case& c, const Function& segment) {
  const Tensor y = checkpoint(segment, c.x);
  const Tensor gradient = torch::autograd::grad({y.sum()}, {c.x}, {}, /*retain_graph=*/true,
                                                /*create_graph=*/true)[0];
  c.values.push_back(gradient);
  gradient.square().sum().backward();
}

void BackwardTwice(Case& c) {
  const Tensor y = checkpoint(c.Segment(), c.x);
  c.values.push_back(torch::autograd::grad({y.sum()}, {c.w0}, {}, /*retain_graph=*/true)[0]);
  c.Backward(y);
}

void WithInnerGradient(Case& c, bool retain_graph, const CheckpointOptions& options = {}) {
  const auto inner = [&c, retain_graph](const Tensor& x) {
    c.Run("begin");
    const Tensor y = at::tanh(at::matmul(x, c.w0));
    const Tensor gradient = torch::autograd::grad({y.sum()}, {x}, {}, retain_graph)[0];
    c.Run("middle");
    Tensor z = at::sin(at::matmul(retain_graph ? y : x, c.w1)) * gradient;
    c.Run("end");
    return z;
  };
  c.Backward(checkpoint(options, inner, c.x));
}

void NoGrad(Case& c) {
  Tensor y;
  {
    const c10::NoGradGuard no_grad;
    y = checkpoint(c.Segment(), c.x);
  }
  c.values.push_back(y);
  c.values.push_back(at::full({}, static_cast<double>(y.requires_grad()), y.options()));
}

void Sequential(Case& c) {
  torch::nn::Sequential modules;
  for (const Tensor& weight : {c.w0, c.w1, c.w2, c.w0, c.w1}) {
    torch::nn::Linear linear(torch::nn::LinearOptions(kSide, kSide).bias(false));
    linear->to(c.dtype);
    {
      const c10::NoGradGuard no_grad;
      linear->weight.copy_(weight);
    }
    modules->push_back(linear);
    modules->push_back(torch::nn::Tanh());
  }
  c.Backward(checkpoint_sequential(modules, 3, c.x));
  for (const Tensor& parameter : modules->parameters()) c.values.push_back(parameter.grad());
}

void FailsInForward(Case& c) {
  const auto fails = [&c](const Tensor& x) -> Tensor {
    c.Segment()(x);
    throw std::runtime_error("this part fails");
  };
  checkpoint(fails, c.x);
}

void FailsAgain(Case& c) {
  const auto fails = [&c](const Tensor& x) {
    if (c.Run("begin") == 2) throw std::runtime_error("this part fails");
    return at::tanh(at::matmul(x, c.w0));
  };
  c.Backward(checkpoint(fails, c.x));
}

void Changes(Case& c, const Function& first, const Function& again,
             const CheckpointOptions& options = {}) {
  const auto change = [&](const Tensor& x) { return (c.Run("begin") == 1 ? first : again)(x); };
  c.Backward(checkpoint(options, change, c.x));
}

Tensor Tanh(const Tensor& x) { return at::tanh(x); }
Tensor SinTanh(const Tensor& x) { return at::sin(at::tanh(x)); }
Function TanhIn(at::ScalarType dtype) {
  return [dtype](const Tensor& x) { return at::tanh(x.to(dtype)); };
}

struct TwiceReader : torch::autograd::Function<TwiceReader> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x});
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    context->get_saved_variables();
    return {gradients[0] * context->get_saved_variables()[0]};
  }
};

void InputIsChanged(Case& c) {
  const Tensor x = c.x * 2;
  const Tensor y = checkpoint(c.Segment(), x);
  x.add_(1);
  c.Backward(y);
}

Function DoublesItsInput(Case& c) {
  return [&c](Tensor x) {
    c.Run("begin");
    return at::tanh(at::matmul(x.mul_(2), c.w0));
  };
}

void InputIsChangedByAnInnerSegment(Case& c) {
  const auto outer = [&c](const Tensor& x) {
    return checkpoint(DoublesItsInput(c), at::matmul(x, c.w1));
  };
  c.Backward(checkpoint(outer, c.x));
}

// Runs `forward` inside user-defined hooks.
Tensor InCountingHooks(Case& c, const std::function<Tensor()>& forward) {
  const SavedTensorsHooks hooks(
      [&c](const Tensor& tensor) {
        c.Run("pack");
        return tensor.detach().clone();
      },
      [&c](const Tensor& kept) {
        c.Run("unpack");
        return kept;
      });
  return forward();
}

void InputIsChangedInsideOfHooks(Case& c) {
  c.Backward(InCountingHooks(
      c, [&c] { return checkpoint(DoublesItsInput(c), at::tanh(at::matmul(c.x, c.w1))); }));
}

void HooksAroundAndInside(Case& c) {
  const auto inside = [&c](const Tensor& x) {
    const Tensor y = c.Segment()(x);
    return at::cos(InCountingHooks(c, [&] { return at::tanh(at::matmul(y, c.w2)); }));
  };
  c.Backward(InCountingHooks(c, [&] { return checkpoint(inside, at::tanh(c.x)); }));
}

void CreateGraphInside(Case& c, const Tensor& x) {
  const auto inner = [&c](const Tensor& in) {
    c.Run("begin");
    const Tensor y = at::tanh(at::matmul(in, c.w0));
    const Tensor gradient = torch::autograd::grad({y.sum()}, {in}, {}, /*retain_graph=*/true,
                                                  /*create_graph=*/true)[0];
    c.Run("middle");
    return at::sin(at::matmul(y, c.w1)) * gradient;
  };
  c.Backward(checkpoint(inner, x));
}

void InputsInContainers(Case& c) {
  const auto sums = [&c](const std::vector<Tensor>& tensors,
                         const std::pair<double, std::optional<Tensor>>& pair) {
    c.Run("begin");
    return at::matmul(at::tanh(at::matmul(tensors[0], tensors[1])) * pair.first, *pair.second);
  };
  c.Backward(checkpoint(sums, std::vector<Tensor>{c.x, at::tanh(c.w0)},
                        std::pair(0.5, std::optional<Tensor>(at::sin(c.w1)))));
}

const std::map<std::string, std::function<void(Case&)>>& Cases() {
  static const auto* cases = new std::map<std::string, std::function<void(Case&)>>{
      {"plain", [](Case& c) { c.Backward(checkpoint(c.Segment(), c.x)); }},
      {"no_early_stop", [](Case& c) { c.Backward(checkpoint(kNoEarlyStop, c.Segment(), c.x)); }},
      {"one_after_the_other",
       [](Case& c) {
         const Tensor y = checkpoint(c.Segment(), c.x);
         c.Backward(checkpoint(c.Segment(), at::tanh(at::matmul(y, c.w2))));
       }},
      {"nested", [](Case& c) { Nested(c); }},
      {"nested_no_early_stop", [](Case& c) { Nested(c, kNoEarlyStop); }},
      {"nested_three_deep", NestedThreeDeep},
      {"other_inputs", OtherInputs},
      {"input_without_gradient",
       [](Case& c) {
         c.x.requires_grad_(false);
         c.Backward(checkpoint(c.Segment(), c.x));
       }},
      {"two_outputs_of_which_one_is_used", TwoOutputs},
      {"dropout", [](Case& c) { Drops(c, {}); }},
      {"dropout_with_other_numbers", [](Case& c) { Drops(c, {.preserve_rng_state = false}); }},
      {"autocast", Autocast},
      {"autocast_in_backward_only", AutocastInBackwardOnly},
      {"retain_graph", RetainGraph},
      {"double_backward", [](Case& c) { DoubleBackward(c, c.Segment()); }},
      {"backward_twice", BackwardTwice},
      {"backward_inside", [](Case& c) { WithInnerGradient(c, /*retain_graph=*/true); }},
      {"backward_inside_that_frees_its_graph",
       [](Case& c) { WithInnerGradient(c, /*retain_graph=*/false); }},
      {"backward_inside_no_early_stop",
       [](Case& c) { WithInnerGradient(c, /*retain_graph=*/true, kNoEarlyStop); }},
      {"no_grad", NoGrad},
      {"sequential", Sequential},
      {"fails_in_forward", FailsInForward},
      {"fails_when_computed_again", FailsAgain},
      {"saves_less", [](Case& c) { Changes(c, SinTanh, Tanh); }},
      {"saves_less_unchecked", [](Case& c) { Changes(c, SinTanh, Tanh, kUnchecked); }},
      {"saves_more", [](Case& c) { Changes(c, Tanh, SinTanh, kNoEarlyStop); }},
      {"saves_more_behind_the_early_stop", [](Case& c) { Changes(c, Tanh, SinTanh); }},
      {"saves_other_shapes",
       [](Case& c) {
         Changes(c, Tanh, [](const Tensor& x) { return at::tanh(x.slice(0, 0, 2)); });
       }},
      {"saves_other_types", [](Case& c) { Changes(c, Tanh, TanhIn(at::kBFloat16)); }},
      {"saves_other_types_unchecked",
       [](Case& c) {
         Changes(c, Tanh, TanhIn(c.dtype == at::kFloat ? at::kDouble : at::kFloat), kUnchecked);
       }},
      {"reads_twice",
       [](Case& c) {
         c.Backward(checkpoint([](const Tensor& x) { return TwiceReader::apply(x); }, c.x));
       }},
      {"input_is_changed", InputIsChanged},
      {"input_is_changed_by_an_inner_segment", InputIsChangedByAnInnerSegment},
      {"input_is_changed_by_the_segment_inside_of_hooks", InputIsChangedInsideOfHooks},
      {"hooks_around_and_inside", HooksAroundAndInside},
      {"backward_inside_creates_a_graph", [](Case& c) { CreateGraphInside(c, c.x); }},
      {"backward_inside_ends_at_an_input_with_history",
       [](Case& c) { CreateGraphInside(c, at::tanh(c.x)); }},
      {"double_backward_nested",
       [](Case& c) { DoubleBackward(c, [&c](const Tensor& x) { return Outer(c, x); }); }},
      {"inputs_in_containers", InputsInContainers},
  };
  return *cases;
}

std::string KindOf(const std::string& message) {
  for (const auto& [text, kind] : Errors()) {
    if (message.find(text) != std::string::npos) return kind;
  }
  return message;
}

// Returns a result in the format of torch_checkpoint.json.
nlohmann::json ResultOf(const std::string& name, at::ScalarType dtype) {
  Case c(dtype);
  nlohmann::json result = {{"values", nlohmann::json::array()}, {"error", nullptr}};
  try {
    Cases().at(name)(c);
  } catch (const c10::Error& error) {
    result["error"] = KindOf(error.what_without_backtrace());
  } catch (const std::exception& error) {
    result["error"] = KindOf(error.what());
  }
  if (result["error"].is_null()) {
    for (const Tensor& leaf : {c.x, c.w0, c.w1, c.w2}) c.values.push_back(leaf.grad());
  }
  for (const Tensor& value : c.values) {
    if (!value.defined()) {
      result["values"].push_back(nullptr);
      continue;
    }
    const Tensor doubles = value.detach().to(at::kDouble).contiguous();
    const double* const data = doubles.const_data_ptr<double>();
    result["values"].push_back(std::vector<double>(data, data + doubles.numel()));
  }
  result["ran"] = c.ran.empty() ? nlohmann::json::object() : nlohmann::json(c.ran);
  return result;
}

// Compares values; `tolerance` 0 compares bits.
void ExpectSameValues(const nlohmann::json& actual, const nlohmann::json& expected,
                      double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    SCOPED_TRACE(::testing::Message() << "value " << i);
    ASSERT_EQ(actual[i].is_null(), expected[i].is_null());
    if (actual[i].is_null()) continue;
    const std::vector<double> a = actual[i], b = expected[i];
    ASSERT_EQ(a.size(), b.size());
    for (size_t j = 0; j < a.size(); ++j) {
      if (tolerance == 0) {
        EXPECT_EQ(std::memcmp(&a[j], &b[j], sizeof(double)), 0) << a[j] << " and " << b[j];
      } else {
        EXPECT_NEAR(a[j], b[j], tolerance * std::max(1.0, std::abs(b[j])));
      }
    }
  }
}

double ToleranceFor(const std::string& name, at::ScalarType dtype) {
  if (name == "autocast") return 0.05;
  // The exempt case recomputes in float.
  return dtype == at::kDouble && name != "saves_other_types_unchecked" ? 1e-12 : 1e-5;
}

void ExpectSameAs(const nlohmann::json& expected, bool same_kernels) {
  ASSERT_EQ(expected.size(), 2 * Cases().size()) << "a case is missing here or there";
  for (const auto& [name, function] : Cases()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const std::string title = name + (dtype == at::kFloat ? " float32" : " float64");
      SCOPED_TRACE(title);
      ASSERT_TRUE(expected.contains(title));
      const nlohmann::json actual = ResultOf(name, dtype);
      EXPECT_EQ(actual["error"], expected[title]["error"]);
      EXPECT_EQ(actual["ran"], expected[title]["ran"]);
      ExpectSameValues(actual["values"], expected[title]["values"],
                       same_kernels ? 0 : ToleranceFor(name, dtype));
    }
  }
}

TEST(TorchCheckpointTest, EachCaseIsWhatTorchUtilsCheckpointHasLeft) {
  ExpectSameAs(nlohmann::json::parse(FileContents("tests/hooks/checkpoint/torch_checkpoint.json")),
               /*same_kernels=*/false);
}

TEST(TorchCheckpointTest, EachCaseHasTheBitsOfTorchUtilsCheckpoint) {
  const std::string python = PythonWithTorch("torch");
  if (python.empty()) GTEST_SKIP() << kNoPythonWithTorch;
  const ProgramOutcome run = RunProgram(python + " -B tests/hooks/checkpoint/torch_checkpoint.py");
  ASSERT_EQ(run.exit_code, 0) << run.err;
  ExpectSameAs(nlohmann::json::parse(run.out), /*same_kernels=*/true);
}

}  // namespace torch_checkpoint_test
}  // namespace pinion::testing
