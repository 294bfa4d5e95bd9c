#include "pinion/bench/attribution/attribution_case.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/attribution/captum_baseline.h"
#include "pinion/bench/bench_main.h"
#include "pinion/device/emulated/time_stats.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/tap.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

// Autograd's workers release the last tensors shortly after the last backward.
constexpr int kLooks = 20;
constexpr absl::Duration kPause = absl::Milliseconds(5);

uint64_t HeldBytes(const AttributionWorld& world, uint64_t before_bytes) {
  uint64_t in_use_bytes = world.in_use_bytes();
  for (int i = 0; i < kLooks && in_use_bytes > before_bytes; ++i) {
    absl::SleepFor(kPause);
    in_use_bytes = world.in_use_bytes();
  }
  return std::max(in_use_bytes, before_bytes) - before_bytes;
}

}  // namespace

absl::StatusOr<AttributionWorld> AttributionWorld::Create(const OffloadModel& model,
                                                          const DevicePreset& preset) {
  RunOptions options;
  options.preset = preset;
  PINION_ASSIGN_OR_RETURN(Accelerator accelerator, Accelerator::Open(options));
  AttributionWorld world = {
      .accelerator = accelerator,
      .model = PutModelOn(model, accelerator.device(), /*checkpoints=*/false)};
  world.model.module->eval();
  world.accelerator.Synchronize();
  world.model_bytes = world.in_use_bytes();
  return world;
}

at::Tensor AttributionWorld::Forward(const at::Tensor& input) const {
  const at::Tensor output = model.forward(input);
  // A picture's output becomes one sum per channel.
  return output.dim() > 2 ? output.sum({2, 3}) : output;
}

AttributedForward AttributionWorld::forward() const {
  return [this](const std::vector<at::Tensor>& inputs) { return Forward(inputs.front()); };
}

AttributionOutcome AttributionWorld::Measure(const AttributionCall& call) {
  accelerator.Synchronize();
  HeldBytes(*this, model_bytes);
  machine().ResetPeakMemory(kDevice);
  machine().ResetTimeStats(kDevice);
  AttributionOutcome outcome;
  const double begin_ms = machine().now_ms();
  outcome.results = call();
  accelerator.Synchronize();
  outcome.cost.time_us = (machine().now_ms() - begin_ms) * 1e3;
  const TimeStats times = machine().time_stats(kDevice);
  outcome.cost.arithmetic_us = times.host_arithmetic_ms * 1e3;
  outcome.cost.copied_bytes = times.d2h_bytes;
  outcome.cost.peak_bytes = machine().memory_stats(kDevice).peak_bytes;
  outcome.cost.held_bytes = HeldBytes(*this, model_bytes);
  // Copied: pinned memory is freed with the machine.
  for (at::Tensor& result : outcome.results) result = result.detach().cpu().clone();
  return outcome;
}

namespace {

using Kind = AttributionWay::Kind;
using Method = AttributionWay::Method;

// A product reads two tensors and writes one.
constexpr uint64_t kProductTraffic = 3;

// Records the device time of each tap and of each complete gradient, and the first tap's gradient
// edge.
class ProbeTaps final : public TapListener {
 public:
  ProbeTaps(EmulatedMachine& machine, Method method) : machine_(machine), method_(method) {
    start_ = Now();
  }

  std::vector<at::Tensor> OnTap(std::string_view name, std::vector<at::Tensor> tensors) override {
    const at::Tensor& tensor = tensors.front();
    layers_.emplace_back(name);
    captures_.push_back({{.size_bytes = tensor.nbytes()}, Now()});
    if (method_ == Method::kActivation) return tensors;
    if (layers_.size() == 1) first_ = torch::autograd::impl::gradient_edge(tensor);
    tensor.register_hook([this](const at::Tensor& gradient) {
      captures_.push_back({{.size_bytes = gradient.nbytes(),
                            .arithmetic_bytes = kProductTraffic * gradient.nbytes()},
                           Now()});
    });
    return tensors;
  }

  const torch::autograd::Edge& first() const { return first_; }
  const std::vector<std::string>& layers() const { return layers_; }

  // Requires that the device is idle.
  std::vector<ReadyTensor> Captures() {
    std::vector<ReadyTensor> captures;
    for (const auto& [tensor, event] : captures_) {
      captures.push_back(tensor);
      captures.back().ready_us = device_->ElapsedMs(start_, event).value() * 1e3;
    }
    return captures;
  }

 private:
  EventHandle Now() {
    const EventHandle event = device_->CreateTimedEvent().value();
    const absl::Status recorded =
        device_->RecordEvent(event, machine_.default_stream(AttributionWorld::kDevice));
    TORCH_CHECK(recorded.ok(), recorded.ToString());
    return event;
  }

  EmulatedMachine& machine_;
  const std::shared_ptr<Device> device_ = machine_.device(AttributionWorld::kDevice);
  const Method method_;
  EventHandle start_;
  std::vector<std::string> layers_;
  std::vector<std::pair<ReadyTensor, EventHandle>> captures_;
  torch::autograd::Edge first_;
};

// Finds the gradient edge of the first block that runs.
class FirstEdge final : public TapListener {
 public:
  std::vector<at::Tensor> OnTap(std::string_view, std::vector<at::Tensor> tensors) override {
    if (!edge_.is_valid()) edge_ = torch::autograd::impl::gradient_edge(tensors.front());
    return tensors;
  }
  const torch::autograd::Edge& first() const { return edge_; }

 private:
  torch::autograd::Edge edge_;
};

// Runs the part that every attribution needs: forward, and backward to the first block.
template <typename Taps>
void PlainStep(const AttributionWorld& world, const AttributedForward& forward, Method method,
               Taps& taps) {
  const at::AutoGradMode grad(method == Method::kGradientXActivation);
  at::Tensor selected;
  {
    const TapScope scope(&taps);
    selected = world.target.Select(forward(world.inputs()));
  }
  if (method == Method::kActivation) return;
  torch::autograd::Engine::get_default_engine().execute(
      {torch::autograd::impl::gradient_edge(selected)}, {at::ones_like(selected)},
      /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/false, {taps.first()});
}

std::vector<at::Tensor> TensorsOf(const std::vector<LayerAttribution>& layers) {
  std::vector<at::Tensor> tensors;
  for (const LayerAttribution& layer : layers) tensors.push_back(layer.tensors.front());
  return tensors;
}

absl::StatusOr<AttributionCall> CallOf(const AttributionWay& way, const AttributionWorld& world,
                                       const std::vector<std::string>& layers) {
  const AttributedForward forward = world.forward();
  const bool gradients = way.method == Method::kGradientXActivation;
  if (way.kind == Kind::kPlain) {
    return AttributionCall([&world, forward, method = way.method]() -> std::vector<at::Tensor> {
      FirstEdge taps;
      PlainStep(world, forward, method, taps);
      return {};
    });
  }
  if (way.kind == Kind::kPinion) {
    PINION_ASSIGN_OR_RETURN(
        const std::shared_ptr<AttributionSession> session,
        AttributionSession::Create(world.accelerator.tier_options(), world.accelerator.backend()));
    return AttributionCall([&world, session, forward, layers, gradients] {
      return TensorsOf(gradients ? LayerGradientXActivation(*session, forward, layers,
                                                            world.inputs(), world.target)
                                 : LayerActivation(*session, forward, layers, world.inputs()));
    });
  }
  const CaptumCall captum = {
      .forward = forward, .layers = layers, .inputs = world.inputs(), .target = world.target};
  return AttributionCall([captum, kind = way.kind, gradients] {
    const CaptumMode mode =
        kind == Kind::kCaptumMemoryEfficient ? CaptumMode::kMemoryEfficient : CaptumMode::kDefault;
    const std::vector<at::Tensor> results =
        gradients ? CaptumGradientXActivation(captum, mode) : CaptumActivation(captum);
    return kind == Kind::kCaptumThenCpu ? ThenCpu(results) : results;
  });
}

std::vector<AttributionWay> AllWays() {
  std::vector<AttributionWay> ways;
  for (const Kind kind : {Kind::kPlain, Kind::kCaptum, Kind::kCaptumThenCpu,
                          Kind::kCaptumMemoryEfficient, Kind::kPinion}) {
    ways.push_back({Method::kGradientXActivation, kind});
  }
  for (const Kind kind : {Kind::kPlain, Kind::kCaptum, Kind::kCaptumThenCpu, Kind::kPinion}) {
    ways.push_back({Method::kActivation, kind});
  }
  return ways;
}

// Measured from the plain step of a method.
struct PlainMethod {
  std::vector<std::string> layers;
  std::vector<ReadyTensor> captures;
  double time_us = 0;
};

absl::StatusOr<PlainMethod> Probe(const OffloadModel& model, const DevicePreset& preset,
                                  Method method) {
  PINION_ASSIGN_OR_RETURN(AttributionWorld world, AttributionWorld::Create(model, preset));
  const AttributedForward forward = world.forward();
  const double begin_ms = world.machine().now_ms();
  ProbeTaps taps(world.machine(), method);
  PlainStep(world, forward, method, taps);
  world.accelerator.Synchronize();
  return PlainMethod{.layers = taps.layers(),
                     .captures = taps.Captures(),
                     .time_us = (world.machine().now_ms() - begin_ms) * 1e3};
}

}  // namespace

absl::StatusOr<std::vector<AttributionRow>> RunWays(const OffloadModel& model,
                                                    const std::string& preset) {
  PINION_ASSIGN_OR_RETURN(const DevicePreset scaled, PresetFor(model, preset));
  std::map<Method, PlainMethod> plain;
  for (const Method method : {Method::kGradientXActivation, Method::kActivation}) {
    PINION_ASSIGN_OR_RETURN(plain[method], Probe(model, scaled, method));
  }
  const CopyRates rates = {.link_gb_per_s = scaled.link.d2h_gb_per_s,
                           .host_memory_gb_per_s = scaled.host_memory_gb_per_s};
  std::vector<AttributionRow> rows;
  std::map<Method, std::vector<at::Tensor>> expected;
  for (const AttributionWay& way : AllWays()) {
    const PlainMethod& step = plain[way.method];
    const auto run = [&]() -> absl::StatusOr<AttributionOutcome> {
      PINION_ASSIGN_OR_RETURN(AttributionWorld world, AttributionWorld::Create(model, scaled));
      PINION_ASSIGN_OR_RETURN(const AttributionCall call, CallOf(way, world, step.layers));
      call();  // fills pools
      return world.Measure(call);
    };
    PINION_ASSIGN_OR_RETURN(
        const AttributionOutcome outcome,
        NoThrow(absl::StrCat(way.method_name(), ", ", way.name(), " on ", scaled.name), run));
    if (way.kind == Kind::kCaptum) expected[way.method] = outcome.results;
    AttributionRow row = {
        .model = model.name(), .preset = preset, .way = way, .cost = outcome.cost};
    std::vector<uint64_t> sizes;
    for (const ReadyTensor& capture : step.captures) {
      row.captured_bytes += capture.size_bytes;
      sizes.push_back(capture.size_bytes);
    }
    std::sort(sizes.rbegin(), sizes.rend());
    row.two_largest_bytes = sizes[0] + sizes[1];
    row.bound_us = CopyBoundUs(step.captures, step.time_us, rates);
    row.same_values = way.kind == Kind::kPlain || SameBits(outcome.results, expected[way.method]);
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace pinion
