#include "pinion/bench/weights/weights_case.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/bench_main.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

using Kind = WeightsWay::Kind;

constexpr int64_t kModelScale = 32;

LinkRates RatesOf(const LinkModel& link) {
  constexpr double kBytesPerUs = 1e3;  // of one GB/s
  return {.out = link.d2h_gb_per_s * kBytesPerUs,
          .in = link.h2d_gb_per_s * kBytesPerUs,
          .duplex_out = link.d2h_duplex_gb_per_s * kBytesPerUs,
          .duplex_in = link.h2d_duplex_gb_per_s * kBytesPerUs};
}

struct ComputeTimes {
  double forward_us = 0;
  double backward_us = 0;
};

// Returns a lower bound on the time of forward and backward if weights are streamed layer by layer
// and the link is always busy. `memory_bytes` are for weights, and for the `saved_bytes` of
// activations that can be offloaded.
//
// A training step begins with no layer on the device, since the optimizer changed all. Forward
// offloads the activations that do not fit beside the layer in use. When backward begins the memory
// is full; backward fetches the rest. It does not need the first layer's weights.
PhaseBound TrainingBound(const LinkModel& link, uint64_t saved_bytes, uint64_t memory_bytes,
                         const ComputeTimes& compute) {
  const LinkRates rates = RatesOf(link);
  const auto layer = static_cast<double>(LayerBytes());
  const auto saved = static_cast<double>(saved_bytes);
  const auto memory = static_cast<double>(memory_bytes);
  const double others = layer * (kModelLayers - 1);
  const double leave = std::max(0.0, saved + layer - memory);
  const double come_back = std::max(0.0, saved + others - memory);
  return {.ends_us = LinkUs(0, layer, rates) + LinkUs(layer, 0, rates),
          .overlapped_us = std::max(compute.forward_us, LinkUs(leave, others, rates)) +
                           std::max(compute.backward_us, LinkUs(others, come_back, rates))};
}

// The same for inference, with `window_layers` on the device. Inference hides all fetches behind
// compute. With room for w of n layers every eviction order fetches at least n * (n - w) / (n - 1)
// layers (Belady). One layer is always in flight on a busy link, so w is the window less one.
PhaseBound InferenceBound(const LinkModel& link, int window_layers, double compute_us) {
  const int room = window_layers < kModelLayers ? window_layers - 1 : kModelLayers;
  const double fetched_layers =
      static_cast<double>(kModelLayers) * (kModelLayers - room) / (kModelLayers - 1);
  const double fetched_bytes = fetched_layers * static_cast<double>(LayerBytes());
  return {.ends_us = 0,
          .overlapped_us = std::max(compute_us, LinkUs(0, fetched_bytes, RatesOf(link)))};
}

// Warm-up: the schedule is learned and memory pinned.
constexpr int kWarmupSteps = 6;
constexpr int kTrainingSteps = 3;
constexpr int kInferencePasses = 12;
// At most this bound over compute: the link hides the weights.
constexpr double kHidden = 1.01;
constexpr int kTargetPercents[] = {50, 75};

bool SameBits(const Tensors& a, const Tensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.equal(y); });
}

struct Outcome {
  WeightsCost cost;
  ComputeTimes compute;
  uint64_t others_bytes = 0;  // without offload, at the end of forward
  Tensors values;             // in pageable memory
};

struct WeightsCase {
  DevicePreset preset;  // scaled
  int64_t batch = 0;    // of the small model
  bool training = false;
};

absl::StatusOr<Outcome> RunWay(const WeightsCase& of, const WeightsWay& way,
                               uint64_t target_bytes) {
  RunOptions options;
  options.preset = of.preset;
  PINION_ASSIGN_OR_RETURN(Accelerator accelerator, Accelerator::Open(options));
  EmulatedMachine& machine = *accelerator.machine();
  const auto run = [&]() -> absl::StatusOr<Outcome> {
    PINION_ASSIGN_OR_RETURN(const std::unique_ptr<Trainee> trainee,
                            MakeTrainee(way, target_bytes, accelerator));
    const at::Tensor x = Waves({of.batch, kModelWidth}, 0).to(accelerator.device());
    const at::AutoGradMode grad(of.training);
    Outcome outcome;
    WeightsCost& cost = outcome.cost;
    Tensors results;  // on the device
    const auto computed_ms = [&] { return machine.time_stats(kTrainedDevice).compute_busy_ms; };
    double phase_ms = 0, step_ms = 0, compute_ms = 0;
    const auto step = [&] {
      const double begin_ms = machine.now_ms();
      const double computed_before_ms = computed_ms();
      at::Tensor result = trainee->Forward(x);
      if (way.kind == Kind::kNone) {
        outcome.others_bytes =
            machine.memory_stats(kTrainedDevice).in_use_bytes - kModelLayers * LayerBytes();
      }
      if (of.training) {
        result = result.pow(2).mean();
        result.backward();
        trainee->Settle();
        accelerator.Synchronize();
        result = result.detach();
      }
      results.push_back(std::move(result));
      const double end_ms = machine.now_ms();
      compute_ms += computed_ms() - computed_before_ms;
      if (of.training) trainee->Step();
      phase_ms += end_ms - begin_ms;
      step_ms += machine.now_ms() - end_ms;
    };
    for (int i = 0; i < kWarmupSteps; ++i) step();
    results.clear();
    // Compute of forward alone.
    if (way.kind == Kind::kNone) {
      accelerator.Synchronize();
      machine.ResetTimeStats(kTrainedDevice);
      const at::NoGradGuard no_grad;
      trainee->Forward(x);
      accelerator.Synchronize();
      outcome.compute.forward_us = computed_ms() * 1e3;
    }
    // Training does not synchronize: prefetches that the optimizer's step started remain in
    // flight.
    if (!of.training) accelerator.Synchronize();
    machine.ResetPeakMemory(kTrainedDevice);
    machine.ResetTimeStats(kTrainedDevice);
    phase_ms = step_ms = compute_ms = 0;
    const int steps = of.training ? kTrainingSteps : kInferencePasses;
    const double begin_ms = machine.now_ms();
    for (int i = 0; i < steps; ++i) {
      if (!of.training) results.clear();
      step();
    }
    if (!of.training) {  // passes follow each other without a pause
      accelerator.Synchronize();
      phase_ms = machine.now_ms() - begin_ms;
      compute_ms = computed_ms();
    }
    cost.phase_us = phase_ms * 1e3 / steps;
    cost.host_step_us = step_ms * 1e3 / steps;
    cost.compute_us = compute_ms * 1e3 / steps;
    const TimeStats times = machine.time_stats(kTrainedDevice);
    cost.fetched_bytes = times.h2d_bytes / steps;
    cost.gradient_bytes = times.d2h_bytes / steps;
    cost.peak_bytes = machine.memory_stats(kTrainedDevice).peak_bytes;
    outcome.compute.backward_us = cost.compute_us - outcome.compute.forward_us;
    for (const at::Tensor& result : results) outcome.values.push_back(result.cpu());
    for (const at::Tensor& weight : trainee->Weights()) {
      outcome.values.push_back(weight.detach().cpu().clone());
    }
    return outcome;
  };
  return NoThrow(absl::StrCat(way.name(), " on ", of.preset.name), run);
}

PhaseBound BoundOf(const WeightsCase& of, const WeightsRow& row, const Outcome& none) {
  if (row.way.kind == Kind::kShared) {
    return TrainingBound(of.preset.link, none.others_bytes, row.target_bytes, none.compute);
  }
  int window_layers = row.way.window_layers;
  if (row.way.kind == Kind::kTarget) {
    // Other memory peaks at the end of forward in training, at any time in inference.
    const uint64_t others_bytes =
        of.training ? none.others_bytes : none.cost.peak_bytes - kModelLayers * LayerBytes();
    const uint64_t left_bytes = row.target_bytes - std::min(row.target_bytes, others_bytes);
    window_layers = std::min(kModelLayers, static_cast<int>(left_bytes / LayerBytes()));
  }
  return of.training ? TrainingBound(of.preset.link, /*saved_bytes=*/0,
                                     window_layers * LayerBytes(), none.compute)
                     : InferenceBound(of.preset.link, window_layers, none.cost.compute_us);
}

}  // namespace

std::string WeightsWay::name() const {
  if (kind == Kind::kNone) return "no offload";
  if (kind == Kind::kBlocking) return "blocking";
  if (kind == Kind::kStreamed) return absl::StrCat("streamed, ", window_layers, " layers");
  return absl::StrCat("target ", target_percent, " %", kind == Kind::kShared ? ", shared" : "");
}

absl::StatusOr<std::vector<WeightsRow>> RunWeights(const std::string& preset, int64_t batch,
                                                   bool training) {
  PINION_ASSIGN_OR_RETURN(const DevicePreset base, FindPreset(preset));
  // FLOPs per byte of weights, in proportion to the batch.
  const WeightsCase of = {
      .preset = ScalePreset(base,
                            {.flops_per_saved_byte = kModelScale,
                             .mean_saved_tensor_bytes = kModelScale * kModelScale},
                            {.flops_per_saved_byte = 1, .mean_saved_tensor_bytes = 1}),
      .batch = batch,
      .training = training};
  std::vector<WeightsRow> rows;
  PINION_ASSIGN_OR_RETURN(const Outcome none, RunWay(of, {}, 0));
  const auto add = [&](const WeightsWay& way, const Outcome& outcome, uint64_t target_bytes) {
    rows.push_back({.preset = preset,
                    .batch = batch * kModelScale,
                    .training = training,
                    .way = way,
                    .cost = outcome.cost,
                    .target_bytes = target_bytes,
                    .bound = {},
                    .same_values = SameBits(none.values, outcome.values)});
  };
  add({}, none, 0);
  std::vector<WeightsWay> ways = {{.kind = Kind::kBlocking}};
  for (const int window_layers : {2, 4, kModelLayers / 2}) {
    ways.push_back({Kind::kStreamed, window_layers});
  }
  for (const Kind kind : {Kind::kTarget, Kind::kShared}) {
    if (kind == Kind::kShared && !training) continue;
    for (const int percent : kTargetPercents) {
      ways.push_back({.kind = kind, .target_percent = percent});
    }
  }
  for (const WeightsWay& way : ways) {
    const uint64_t target_bytes = none.cost.peak_bytes * way.target_percent / 100;
    PINION_ASSIGN_OR_RETURN(const Outcome outcome, RunWay(of, way, target_bytes));
    add(way, outcome, target_bytes);
    if (!way.streams()) continue;
    WeightsRow& row = rows.back();
    row.bound = BoundOf(of, row, none);
    row.is_hidden = row.bound.overlapped_us <= kHidden * none.cost.compute_us;
  }
  return rows;
}

}  // namespace pinion
