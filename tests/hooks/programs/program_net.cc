#include "pinion/tests/hooks/programs/program_net.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/gru.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/rrelu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>
#include <vector>

#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/checkpoint/checkpoint.h"

namespace pinion::testing {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// In the order of the parameters.
constexpr size_t kMatrices = 3;
constexpr size_t kKernel = kMatrices;
constexpr size_t kScale = kKernel + 1;
constexpr size_t kShift = kScale + 1;
constexpr int64_t kChannels = 4;  // of convolutions
constexpr int64_t kGroups = 4;
// Only in programs with recurrent layers.
constexpr size_t kInputGates = kShift + 1;
constexpr size_t kHiddenGates = kInputGates + 1;
constexpr int64_t kHidden = 32;

// What `a`'s storage begins with, in the shape of `a`. Not of a view that may cover less than half
// of it: of such a one only its own bytes are saved (docs/users/limits.md).
Tensor FromStartOfStorage(const Tensor& a) {
  const bool is_dense = a.is_non_overlapping_and_dense();
  return (is_dense ? a : a.contiguous()).as_strided(a.sizes(), {a.size(1), 1}, 0);
}

bool DrawsNumbers(const Program& program, size_t begin, size_t end) {
  return std::any_of(program.ops.begin() + static_cast<ptrdiff_t>(begin),
                     program.ops.begin() + static_cast<ptrdiff_t>(end), [](const Op& op) {
                       return op.kind == OpKind::kDropout || op.kind == OpKind::kRrelu ||
                              op.kind == OpKind::kMask || op.kind == OpKind::kNoise;
                     });
}

// Calls an operator when it is destroyed. Swallows its error, which would end the process.
class [[nodiscard]] Guard {
 public:
  [[nodiscard]] explicit Guard(Tensor count) : count_(std::move(count)) {}
  ~Guard() {
    if (!count_.defined()) return;
    const at::NoGradGuard no_grad;
    try {
      count_.add_(1);
    } catch (const std::exception&) {
    }
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  Tensor count_;
};

// Halves a gradient, by several times its memory.
Tensor HalvedByParts(const Tensor& gradient) {
  const Tensor wide = at::cat({gradient, gradient, gradient, gradient});
  return (wide * 0.125).chunk(4).front() + gradient * 0.375;
}

// tanh(a / 2), which saves what `variant` says.
enum Variant { kSavesInput, kSavesOutput, kSavesIntermediate, kReadsStartOfStorage, kVariants };
struct Custom : torch::autograd::Function<Custom> {
  static Tensor forward(AutogradContext* context, const Tensor& a, int64_t variant) {
    const Tensor half = a.mul(0.5);
    Tensor y = half.tanh();
    context->saved_data["variant"] = variant;
    context->save_for_backward({variant == kSavesOutput         ? y
                                : variant == kSavesIntermediate ? half
                                                                : a});
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const int64_t variant = context->saved_data["variant"].toInt();
    const Tensor saved = context->get_saved_variables()[0];
    Tensor y = saved;
    if (variant == kSavesIntermediate) y = saved.tanh();
    if (variant == kSavesInput || variant == kReadsStartOfStorage) y = saved.mul(0.5).tanh();
    Tensor gradient = gradients[0] * (1 - y * y) * 0.5;
    if (variant == kReadsStartOfStorage) gradient = gradient + FromStartOfStorage(saved) * 0.01;
    return {gradient, Tensor()};
  }
};

}  // namespace

ProgramNet::ProgramNet(const Program& program, bool checkpoints)
    : program_(program), checkpoints_(checkpoints) {
  const int64_t width = program.width;
  const double scale = 1 / std::sqrt(static_cast<double>(width));
  const auto append = [&](size_t number, const Tensor& parameter) {
    if (program.frozen == 0 || number != static_cast<size_t>(program.frozen)) {
      parameter.requires_grad_(true);
      if (program.short_gradients != 0) parameter.set_grad_dtype(at::kBFloat16);
    }
    parameters_->append(parameter);
  };
  for (size_t i = 0; i < kMatrices; ++i) append(i, at::randn({width, width}) * scale);
  append(kKernel, at::randn({kChannels, kChannels, 3, 3}) * 0.2);
  append(kScale, at::ones({width}));
  append(kShift, at::zeros({width}));
  const auto is_recurrent = [](const Op& op) { return op.kind == OpKind::kRecurrent; };
  if (std::any_of(program.ops.begin(), program.ops.end(), is_recurrent)) {
    for (const size_t gates : {kInputGates, kHiddenGates}) {
      append(gates, at::randn({3 * kHidden, kHidden}) * 0.2);
    }
  }
  for (const Op& op : program.ops) {
    const size_t matrix = static_cast<size_t>(op.extra) / 2 % kMatrices;
    const bool is_hook = op.kind == OpKind::kHook && op.extra % 2 == 1;
    if (is_hook && Parameter(matrix).requires_grad())
      Parameter(matrix).register_hook(HalvedByParts);
  }
  running_mean_ = at::zeros({width});
  running_variance_ = at::ones({width});
  if (program.guarded_segments != 0) guards_at_end_ = at::zeros({});
}

void ProgramNet::MoveBuffers(at::Device device) {
  running_mean_ = running_mean_.to(device);
  running_variance_ = running_variance_.to(device);
  if (guards_at_end_.defined()) guards_at_end_ = guards_at_end_.to(device);
}

bool ProgramNet::GuardsHaveRun() const {
  return !guards_at_end_.defined() || guards_at_end_.item<float>() == static_cast<float>(guards_);
}

Tensor ProgramNet::Parameter(size_t index) { return parameters_->at(index); }

void ProgramNet::Measure(const Tensor& a) {
  const at::NoGradGuard no_grad;
  const int64_t copies = program_.odd_steps_measure <= 2 ? 2 : 4;
  metrics_ += a.repeat({copies, 1}).softmax(1).argmax(1).sum().item<int64_t>();
}

Tensor ProgramNet::Loss(const Tensor& input, int step, Registers* results) {
  Registers registers;
  registers.fill(program_.normalises_input ? (input - input.mean()) / input.std() : input);
  const size_t ops = program_.ops.size();
  const bool odd_step = step % 2 == 1;
  RunOps(0, ops, odd_step, registers, program_.MeasuresInForward(step) ? ops / 2 : kNever);
  const auto repeated = std::min(ops, static_cast<size_t>(program_.odd_steps_longer));
  for (int i = step % kOddStepPeriod; i > 0; --i) {
    RunOps(ops - repeated, ops, odd_step, registers);
  }
  Tensor sum = at::linear(registers[0], Parameter(0));
  for (size_t i = 1; i < registers.size(); ++i) sum = sum + registers[i];
  if (results != nullptr) *results = registers;
  registers = {};
  return (sum * sum).mean();
}

void ProgramNet::RunOps(size_t begin, size_t end, bool odd_step, Registers& registers,
                        size_t measure_at) {
  for (size_t i = begin; i < end; ++i) {
    const Op& op = program_.ops[i];
    if (i >= measure_at) {
      Measure(registers[0]);
      measure_at = kNever;
    }
    if (odd_step && program_.odd_steps_skip == static_cast<int>(i) + 1) continue;
    if (!IsCheckpoint(op.kind)) {
      registers[op.out] = Apply(op, registers[op.in], registers[op.other]);
      after_operator_();
      continue;
    }
    const size_t segment_end = std::min(i + 2 + static_cast<size_t>(op.extra) % 8, end);
    if (checkpoints_) {
      RunSegment(op.kind, i + 1, segment_end, odd_step, registers);
    } else {
      RunOps(i + 1, segment_end, odd_step, registers);
    }
    i = segment_end - 1;
  }
  if (measure_at != kNever) Measure(registers[0]);
}

// The segment takes the registers that its operators use, and returns them.
void ProgramNet::RunSegment(OpKind kind, size_t begin, size_t end, bool odd_step,
                            Registers& registers) {
  std::vector<size_t> used;
  for (size_t r = 0; r < registers.size(); ++r) {
    const int number = static_cast<int>(r);
    if (std::any_of(program_.ops.begin() + static_cast<ptrdiff_t>(begin),
                    program_.ops.begin() + static_cast<ptrdiff_t>(end), [number](const Op& op) {
                      return op.out == number || op.in == number || op.other == number;
                    })) {
      used.push_back(r);
    }
  }
  std::vector<Tensor> inputs;
  for (const size_t r : used) inputs.push_back(std::move(registers[r]));
  const bool preserves = program_.forgets_generators == 0 || DrawsNumbers(program_, begin, end);
  const CheckpointOptions options = {.preserve_rng_state = preserves,
                                     .early_stop = kind != OpKind::kWholeCheckpoint,
                                     .determinism_check = program_.unchecked_segments != 0
                                                              ? DeterminismCheck::kNone
                                                              : DeterminismCheck::kDefault,
                                     .if_planned = kind == OpKind::kPlannedCheckpoint};
  const auto segment = [this, begin, end, odd_step, used](std::vector<Tensor>& values) {
    Registers inside;
    for (size_t i = 0; i < used.size(); ++i) inside[used[i]] = std::move(values[i]);
    ++guards_;
    const Guard guard(guards_at_end_);
    RunOps(begin, end, odd_step, inside);
    std::vector<Tensor> outputs;
    for (const size_t r : used) outputs.push_back(inside[r]);
    return outputs;
  };
  const std::vector<Tensor> outputs = checkpoint(options, segment, std::move(inputs));
  for (size_t i = 0; i < used.size(); ++i) registers[used[i]] = outputs[i];
}

// One layer over `width` / kHidden steps.
Tensor ProgramNet::Recurrent(const Tensor& a) {
  const int64_t rows = a.size(0), width = a.size(1);
  const Tensor steps = a.to(at::kFloat).reshape({rows, width / kHidden, kHidden});
  const std::vector<Tensor> gates = {Parameter(kInputGates), Parameter(kHiddenGates)};
  const auto [output, last] =
      at::gru(steps, at::zeros({1, rows, kHidden}, steps.options()), gates, /*has_biases=*/false,
              /*num_layers=*/1, /*dropout=*/0, /*train=*/true, /*bidirectional=*/false,
              /*batch_first=*/true);
  return output.reshape({rows, width});
}

// Values stay around 1, however many operators there are.
Tensor ProgramNet::Apply(const Op& op, const Tensor& a, const Tensor& b) {
  const Tensor scale = Parameter(kScale), shift = Parameter(kShift);
  const int64_t rows = a.size(0), width = a.size(1);
  switch (op.kind) {
    case OpKind::kAdd:
      return (a + b) * 0.5;
    case OpKind::kMul:
      return (a * b).tanh();
    case OpKind::kSin:
      return a.sin();
    case OpKind::kGelu:
      return at::gelu(a);
    case OpKind::kRelu:
      return a.relu();
    case OpKind::kSoftmax:
      return a.softmax(op.extra % 2) * 4;
    case OpKind::kLinear:
      return at::linear(a, Parameter(static_cast<size_t>(op.extra) % kMatrices), shift);
    case OpKind::kAttention:
      return (a.matmul(b.t()) * 0.1).softmax(1).matmul(a);
    case OpKind::kConvolution:
      return at::conv2d(a.reshape({rows, kChannels, width / 32, 8}), Parameter(kKernel), {}, 1, 1)
          .reshape({rows, width});
    case OpKind::kLayerNorm:
      return at::layer_norm(a, {width}, scale, shift);
    case OpKind::kGroupNorm:
      return at::group_norm(a, kGroups, scale, shift);
    case OpKind::kBatchNorm:
      return at::batch_norm(a, scale, shift, running_mean_, running_variance_, /*training=*/true,
                            0.1, 1e-5, false);
    case OpKind::kTransposed:
      return a.t().sin().t();
    case OpKind::kSlice:
      return at::cat({a, b}).narrow(0, op.extra % 2 * rows, rows);
    case OpKind::kReshape:
      return a.reshape({width, rows}).tanh().reshape({rows, width});
    case OpKind::kExpand:
      return (a.mean(0, /*keepdim=*/true).expand_as(b) * b).tanh();
    case OpKind::kBroadcast:
      return a.narrow(0, op.extra % rows, 1).expand({rows, width});
    case OpKind::kAsStrided:
      return FromStartOfStorage(a).sin() + b;
    case OpKind::kInPlace: {
      Tensor y = a.sin();
      y.add_(b);
      return y.tanh_();
    }
    case OpKind::kInPlaceView: {
      const Tensor y = a + b;
      Tensor half = y.narrow(1, 0, width / 2);
      // LibTorch cannot differentiate a saved output twice if it was a view that is destroyed.
      if (program_.create_graph != 0) {
        half.sin_();
      } else {
        half.sigmoid_();
      }
      return y;
    }
    case OpKind::kDropout:
      return at::dropout(a, 0.3, /*train=*/true);
    case OpKind::kRrelu:
      return at::rrelu(a, 0.1, 0.9, /*training=*/true);
    case OpKind::kMask: {
      const Tensor mask = (at::rand_like(a) > 0.3).to(a.dtype());
      return a * mask;
    }
    case OpKind::kNoise:
      return at::randn_like(a);
    case OpKind::kWhere:
      return at::where(a > b, a, b * 0.5);
    case OpKind::kGather:
      return a.index_select(0, b.detach().select(1, 0).argsort());
    case OpKind::kCast:
      return a.to(at::kBFloat16).sin().to(at::kFloat);
    case OpKind::kDetach:
      return a.detach();
    case OpKind::kCustom:
      return Custom::apply(a, static_cast<int64_t>(op.extra % kVariants));
    case OpKind::kNoOffload: {
      const NoOffloadScope stays;
      return a.tanh();
    }
    case OpKind::kRecurrent:
      // emu does not differentiate such layers twice.
      return program_.create_graph != 0 ? a.tanh() : Recurrent(a);
    case OpKind::kHook:
      if (op.extra % 2 == 0 && a.requires_grad()) a.register_hook(HalvedByParts);
      return a;
    default:
      return a;  // checkpoints are in RunOps
  }
}

}  // namespace pinion::testing
