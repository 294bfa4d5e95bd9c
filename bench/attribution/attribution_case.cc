#include "pinion/bench/attribution/attribution_case.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/attribution/attribution_table.h"
#include "pinion/bench/attribution/captum_baseline.h"
#include "pinion/bench/attribution/copy_bound.h"
#include "pinion/bench/offload/offload_model.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/time_stats.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/gradient_shap.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/path_methods.h"
#include "pinion/hooks/attribution/tap.h"
#include "pinion/hooks/attribution/target.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

// One call of a method; returns its results by layer.
using AttributionCall = std::function<std::vector<at::Tensor>()>;

struct AttributionOutcome {
  AttributionCost cost;
  std::vector<at::Tensor> results;  // in pageable memory
};

// A model on its own emulated machine, ready for attribution, and the cost of a call. The model is
// in evaluation mode.
struct AttributionWorld {
  static constexpr int kDevice = 0;

  static absl::StatusOr<AttributionWorld> Create(const OffloadModel& model,
                                                 const DevicePreset& preset);

  Accelerator accelerator;
  ModelOnDevice model;
  Target target = Target::Class(1);
  uint64_t model_bytes = 0;  // on the device: the model and its inputs

  EmulatedMachine& machine() const { return *accelerator.machine(); }
  std::vector<at::Tensor> inputs() const { return {model.input}; }
  // [examples, classes], in float32
  at::Tensor Forward(const at::Tensor& input) const;
  // Returns Forward of the first input. The world outlives it.
  AttributedForward forward() const;
  uint64_t in_use_bytes() const { return machine().memory_stats(kDevice).in_use_bytes; }

  // Waits until memory of earlier calls is freed, then measures `call`.
  AttributionOutcome Measure(const AttributionCall& call);
};

// Runs `run` and turns exceptions into Internal errors that begin with `what`.
absl::StatusOr<AttributionOutcome> NoThrow(
    const std::string& what, const std::function<absl::StatusOr<AttributionOutcome>()>& run);

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
  const at::Tensor output = model.forward(input).to(at::kFloat);
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

absl::StatusOr<AttributionOutcome> NoThrow(
    const std::string& what, const std::function<absl::StatusOr<AttributionOutcome>()>& run) {
  try {
    return run();
  } catch (const c10::Error& error) {
    return absl::InternalError(absl::StrCat(what, ": ", error.what_without_backtrace()));
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat(what, ": ", error.what()));
  }
}

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
    OffloadOptions options;
    options.allocator = world.accelerator.tier_options().allocator;
    PINION_ASSIGN_OR_RETURN(const std::shared_ptr<OffloadSession> session,
                            OffloadSession::Create(options, world.accelerator.backend()));
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
    PINION_ASSIGN_OR_RETURN(
        const std::shared_ptr<AttributionSession> session,
        AttributionSession::Create(world.accelerator.tier_options(), world.accelerator.backend()));
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

class AttributionCase {
 public:
  // NotFound names all presets.
  static absl::StatusOr<AttributionCase> Create(const OffloadModel& model,
                                                const std::string& preset);

  absl::StatusOr<std::vector<AttributionRow>> RunAll() const;
  absl::StatusOr<AttributionOutcome> Run(const AttributionWay& way) const;

 private:
  // Measured from the plain step of a method.
  struct Step {
    std::vector<std::string> layers;
    std::vector<ReadyTensor> captures;
    double time_us = 0;
  };

  AttributionCase() = default;
  absl::StatusOr<Step> Probe(AttributionWay::Method method) const;

  OffloadModel model_;
  std::string preset_name_;
  DevicePreset preset_;
  std::map<AttributionWay::Method, Step> steps_;
};

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

// The middle layer.
constexpr char kLayer[] = "blocks.3";
constexpr int64_t kExamples = 2;
// A CPU computes hundreds of 16 x 16 pictures in seconds.
constexpr int64_t kSide = 16;

// {steps, steps of the budget}. Cases that fit at once come first.
constexpr std::pair<int64_t, int64_t> kSteps[] = {{8, 8}, {32, 32}, {32, 8}, {128, 8}, {128, 32}};
constexpr int64_t kMostSteps = 128;
// For LayerGradientShap, which Captum does not batch, and for quick runs.
constexpr int64_t kFewSteps = 32;

at::Tensor RunPinion(AttributionSession& session, const AttributedForward& forward,
                     const PathWay& way, const CaptumPathCall& call, uint64_t budget_bytes) {
  const std::vector<std::string> layers = {kLayer};
  const std::vector<at::Tensor> inputs = {call.input};
  PathOptions options;
  options.n_steps = way.n_steps;
  options.device_budget_bytes = budget_bytes;
  ShapOptions shap;
  shap.n_samples = way.n_steps;
  shap.device_budget_bytes = budget_bytes;
  switch (way.method) {
    case PathMethod::kIntegratedGradients:
      return IntegratedGradients(session, forward, inputs, call.target, options)[0];
    case PathMethod::kLayerIntegratedGradients:
      return LayerIntegratedGradients(session, forward, layers, inputs, call.target, options)[0]
          .tensors[0];
    case PathMethod::kInternalInfluence:
      return InternalInfluence(session, forward, layers, inputs, call.target, options)[0]
          .tensors[0];
    case PathMethod::kLayerConductance:
      return LayerConductance(session, forward, layers, inputs, call.target, options)[0].tensors[0];
    case PathMethod::kLayerGradientShap:
      return LayerGradientShap(session, forward, layers, inputs,
                               {at::zeros_like(call.input.narrow(0, 0, 1))}, call.target, shap,
                               call.draws)[0]
          .tensors[0];
  }
  return {};
}

class PathRuns {
 public:
  PathRuns(OffloadModel model, std::string preset_name, DevicePreset preset)
      : model_(model), preset_name_(std::move(preset_name)), preset_(std::move(preset)) {}

  // Adds Captum's row, if Captum has the method, and Pinion's.
  absl::Status Add(const PathWay& way) {
    PathWay captum = way, pinion = way;
    pinion.is_pinion = true;
    if (way.fits_at_once() || way.method != PathMethod::kLayerGradientShap) {
      PINION_RETURN_IF_ERROR(AddRow(captum));
    }
    return AddRow(pinion);
  }

  std::vector<PathRow> TakeRows() { return std::move(rows_); }

 private:
  absl::Status AddRow(const PathWay& way) {
    const std::pair<PathMethod, int64_t> at_once = {way.method, way.budget_steps};
    PathRow row = {.model = model_.name(),
                   .preset = preset_name_,
                   .way = way,
                   .budget_bytes = budgets_[at_once]};
    const std::string what =
        absl::StrCat(PathMethodName(way.method), ", ", way.n_steps, " steps, on ", preset_.name);
    PINION_ASSIGN_OR_RETURN(const AttributionOutcome outcome, NoThrow(what, [&] {
                              return Run(way, row.budget_bytes, row.forwards);
                            }));
    row.peak_bytes = outcome.cost.peak_bytes;
    row.time_us = outcome.cost.time_us;
    if (!way.is_pinion && way.fits_at_once()) {
      row.budget_bytes = budgets_[at_once] = outcome.cost.peak_bytes;
    }
    at::Tensor& expected = expected_[{way.method, way.n_steps}];
    const at::Tensor& actual = outcome.results.front();
    if (!expected.defined()) expected = actual;
    row.difference = ((actual - expected).abs().max() / expected.abs().max()).item<double>();
    rows_.push_back(std::move(row));
    return absl::OkStatus();
  }

  absl::StatusOr<AttributionOutcome> Run(const PathWay& way, uint64_t budget_bytes,
                                         int64_t& forwards) const {
    PINION_ASSIGN_OR_RETURN(AttributionWorld world, AttributionWorld::Create(model_, preset_));
    world.model.input =
        world.model.input.narrow(0, 0, kExamples).narrow(2, 0, kSide).narrow(3, 0, kSide).clone();
    world.model_bytes = world.in_use_bytes();
    const AttributedForward forward = [&](const std::vector<at::Tensor>& inputs) {
      ++forwards;
      return world.Forward(inputs.front());
    };
    CaptumPathCall call = {.forward = forward,
                           .layer = kLayer,
                           .input = world.model.input,
                           .target = world.target,
                           .n_steps = way.n_steps};
    if (way.method == PathMethod::kLayerGradientShap) {
      call.draws = DrawShap({call.input}, /*baselines=*/1, {.n_samples = way.n_steps});
    }
    AttributionCall run;
    if (way.is_pinion) {
      PINION_ASSIGN_OR_RETURN(const std::shared_ptr<AttributionSession> session,
                              AttributionSession::Create(world.accelerator.tier_options(),
                                                         world.accelerator.backend()));
      run = [&world, &forward, way, call, session, budget_bytes]() -> std::vector<at::Tensor> {
        return {RunPinion(*session, forward, way, call, budget_bytes)};
      };
      // Warm-up fills the pools.
      run();
    } else {
      const int64_t overlap = way.method == PathMethod::kLayerConductance ? 1 : 0;
      if (!way.fits_at_once()) call.internal_batch_size = kExamples * (way.budget_steps + overlap);
      run = [way, call]() -> std::vector<at::Tensor> { return {CaptumPath(way.method, call)}; };
    }
    forwards = 0;
    return world.Measure(run);
  }

  const OffloadModel model_;
  const std::string preset_name_;
  const DevicePreset preset_;
  std::map<std::pair<PathMethod, int64_t>, uint64_t> budgets_;     // by steps per batch
  std::map<std::pair<PathMethod, int64_t>, at::Tensor> expected_;  // by steps
  std::vector<PathRow> rows_;
};

}  // namespace

absl::StatusOr<std::vector<AttributionRow>> RunWays(const OffloadModel& model,
                                                    const std::string& preset) {
  PINION_ASSIGN_OR_RETURN(const AttributionCase of, AttributionCase::Create(model, preset));
  return of.RunAll();
}

bool HasPaths(const OffloadModel& model) {
  return model.kind == OffloadModel::Kind::kConvNet && !model.autocast;
}

absl::StatusOr<std::vector<PathRow>> RunPaths(const OffloadModel& model, const std::string& preset,
                                              bool quick) {
  PINION_ASSIGN_OR_RETURN(DevicePreset scaled, PresetFor(model, preset));
  PathRuns runs(model, preset, std::move(scaled));
  for (const PathMethod method :
       {PathMethod::kIntegratedGradients, PathMethod::kLayerIntegratedGradients,
        PathMethod::kInternalInfluence, PathMethod::kLayerConductance,
        PathMethod::kLayerGradientShap}) {
    const bool few = quick || method == PathMethod::kLayerGradientShap;
    for (const auto& [steps, budget_steps] : kSteps) {
      if (steps > (few ? kFewSteps : kMostSteps)) continue;
      PINION_RETURN_IF_ERROR(runs.Add({method, steps, budget_steps}));
    }
  }
  return runs.TakeRows();
}

}  // namespace pinion
