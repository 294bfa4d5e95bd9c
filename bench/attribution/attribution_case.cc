#include "pinion/bench/attribution/attribution_case.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/attribution/attribution_world.h"
#include "pinion/bench/attribution/captum_baseline.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/tap.h"
#include "pinion/hooks/attribution/target.h"
#include "pinion/programs/accelerator.h"

namespace pinion {
namespace {

using Kind = AttributionWay::Kind;
using Method = AttributionWay::Method;

// Warm-up fills pools, and a session learns the order of backward's reads.
constexpr int kWarmupCalls = 1;
constexpr int kWarmupCallsInScope = 3;
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
  AttributedForward forward = world.forward();
  if (way.in_scope) {
    PINION_ASSIGN_OR_RETURN(const std::shared_ptr<OffloadSession> session,
                            OffloadSession::Create({}, world.accelerator.backend()));
    forward = [&world, session](const std::vector<at::Tensor>& inputs) {
      const OffloadScope scope(session, *world.model.module);
      return world.Forward(inputs.front());
    };
  }
  const bool gradients = way.method == Method::kGradientXActivation;
  if (way.kind == Kind::kPlain) {
    return AttributionCall([&world, forward, method = way.method]() -> std::vector<at::Tensor> {
      FirstEdge taps;
      PlainStep(world, forward, method, taps);
      return {};
    });
  }
  if (way.kind == Kind::kPinion) {
    PINION_ASSIGN_OR_RETURN(const std::shared_ptr<AttributionSession> session,
                            AttributionSession::Create({}, world.accelerator.backend()));
    return AttributionCall([&world, session, forward, layers, gradients] {
      return TensorsOf(gradients ? LayerGradientXActivation(*session, forward, layers,
                                                            world.inputs(), world.target)
                                 : LayerActivation(*session, forward, layers, world.inputs()));
    });
  }
  CaptumCall captum = {.forward = std::move(forward),
                       .layers = layers,
                       .inputs = world.inputs(),
                       .target = world.target};
  return AttributionCall([captum = std::move(captum), kind = way.kind, gradients] {
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
  for (const Kind kind : {Kind::kPlain, Kind::kPinion}) {
    ways.push_back({Method::kGradientXActivation, kind, /*in_scope=*/true});
  }
  for (const Kind kind : {Kind::kPlain, Kind::kCaptum, Kind::kCaptumThenCpu, Kind::kPinion}) {
    ways.push_back({Method::kActivation, kind});
  }
  return ways;
}

bool SameBits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.equal(y); });
}

}  // namespace

absl::StatusOr<AttributionCase> AttributionCase::Create(const OffloadModel& model,
                                                        const std::string& preset) {
  AttributionCase of;
  of.model_ = model;
  of.preset_name_ = preset;
  PINION_ASSIGN_OR_RETURN(of.preset_, PresetFor(model, preset));
  for (const Method method : {Method::kGradientXActivation, Method::kActivation}) {
    PINION_ASSIGN_OR_RETURN(of.steps_[method], of.Probe(method));
  }
  return of;
}

absl::StatusOr<AttributionCase::Step> AttributionCase::Probe(Method method) const {
  PINION_ASSIGN_OR_RETURN(AttributionWorld world, AttributionWorld::Create(model_, preset_));
  const AttributedForward forward = world.forward();
  const double begin_ms = world.machine().now_ms();
  ProbeTaps taps(world.machine(), method);
  PlainStep(world, forward, method, taps);
  world.accelerator.Synchronize();
  return Step{.layers = taps.layers(),
              .captures = taps.Captures(),
              .time_us = (world.machine().now_ms() - begin_ms) * 1e3};
}

absl::StatusOr<AttributionOutcome> AttributionCase::Run(const AttributionWay& way) const {
  const auto run = [&]() -> absl::StatusOr<AttributionOutcome> {
    PINION_ASSIGN_OR_RETURN(AttributionWorld world, AttributionWorld::Create(model_, preset_));
    PINION_ASSIGN_OR_RETURN(const AttributionCall call,
                            CallOf(way, world, steps_.at(way.method).layers));
    for (int i = 0; i < (way.in_scope ? kWarmupCallsInScope : kWarmupCalls); ++i) call();
    return world.Measure(call);
  };
  return NoThrow(absl::StrCat(way.method_name(), ", ", way.name(), " on ", preset_.name), run);
}

absl::StatusOr<std::vector<AttributionRow>> AttributionCase::RunAll() const {
  std::vector<AttributionRow> rows;
  std::map<Method, std::vector<at::Tensor>> expected;
  for (const AttributionWay& way : AllWays()) {
    PINION_ASSIGN_OR_RETURN(const AttributionOutcome outcome, Run(way));
    if (way.kind == Kind::kCaptum) expected[way.method] = outcome.results;
    const Step& step = steps_.at(way.method);
    std::vector<uint64_t> sizes;
    AttributionRow row = {
        .model = model_.name(), .preset = preset_name_, .way = way, .cost = outcome.cost};
    for (const ReadyTensor& capture : step.captures) {
      row.captured_bytes += capture.size_bytes;
      sizes.push_back(capture.size_bytes);
    }
    std::sort(sizes.rbegin(), sizes.rend());
    row.two_largest_bytes = sizes[0] + sizes[1];
    const CopyRates rates = {.link_gb_per_s = preset_.link.d2h_gb_per_s,
                             .host_memory_gb_per_s = preset_.host_memory_gb_per_s};
    row.bound_us = CopyBoundUs(step.captures, step.time_us, rates);
    row.bound_of_two_us =
        CopyBoundUs(step.captures, step.time_us, rates, CopyMemory::kForTwoLargest);
    row.same_values = way.kind == Kind::kPlain || SameBits(outcome.results, expected[way.method]);
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace pinion
