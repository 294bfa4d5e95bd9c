#include "pinion/bench/weights/weights_case.h"

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

using Kind = WeightsWay::Kind;
using Tensors = std::vector<at::Tensor>;

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

}  // namespace

absl::StatusOr<WeightsCase> WeightsCase::Create(const std::string& preset, int64_t batch,
                                                bool training) {
  WeightsCase of;
  of.preset_name_ = preset;
  PINION_ASSIGN_OR_RETURN(const DevicePreset base, FindPreset(preset));
  // FLOPs per byte of weights, in proportion to the batch.
  of.preset_ = ScalePreset(
      base,
      {.flops_per_saved_byte = kModelScale, .mean_saved_tensor_bytes = kModelScale * kModelScale},
      {.flops_per_saved_byte = 1, .mean_saved_tensor_bytes = 1});
  of.batch_ = batch;
  of.training_ = training;
  return of;
}

absl::StatusOr<WeightsCase::Outcome> WeightsCase::Run(const WeightsWay& way,
                                                      uint64_t target_bytes) const {
  RunOptions options;
  options.preset = preset_;
  PINION_ASSIGN_OR_RETURN(Accelerator accelerator, Accelerator::Open(options));
  EmulatedMachine& machine = *accelerator.machine();
  try {
    PINION_ASSIGN_OR_RETURN(const std::unique_ptr<Trainee> trainee,
                            MakeTrainee(way, target_bytes, accelerator));
    const at::Tensor x = Waves({batch_, kModelWidth}, 0).to(accelerator.device());
    const at::AutoGradMode grad(training_);
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
      if (training_) {
        result = result.pow(2).mean();
        result.backward();
        trainee->Settle();
        accelerator.Synchronize();
        result = result.detach();
      }
      results.push_back(std::move(result));
      const double end_ms = machine.now_ms();
      compute_ms += computed_ms() - computed_before_ms;
      if (training_) trainee->Step();
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
    // Training does not synchronize: prefetches that the optimizer's step started remain in flight.
    if (!training_) accelerator.Synchronize();
    machine.ResetPeakMemory(kTrainedDevice);
    machine.ResetTimeStats(kTrainedDevice);
    phase_ms = step_ms = compute_ms = 0;
    const int steps = training_ ? kTrainingSteps : kInferencePasses;
    const double begin_ms = machine.now_ms();
    for (int i = 0; i < steps; ++i) {
      if (!training_) results.clear();
      step();
    }
    if (!training_) {  // passes follow each other without a pause
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
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat(way.name(), " on ", preset_name_, ": ", error.what()));
  }
}

absl::StatusOr<std::vector<WeightsRow>> WeightsCase::RunAll() const {
  std::vector<WeightsRow> rows;
  PINION_ASSIGN_OR_RETURN(const Outcome none, Run({}));
  const auto add = [&](const WeightsWay& way, const Outcome& outcome, uint64_t target_bytes) {
    rows.push_back({.preset = preset_name_,
                    .batch = batch_ * kModelScale,
                    .training = training_,
                    .way = way,
                    .cost = outcome.cost,
                    .target_bytes = target_bytes,
                    .bound = {},
                    .same_values = SameBits(none.values, outcome.values)});
  };
  add({}, none, 0);
  std::vector<WeightsWay> ways = {{.kind = Kind::kBlocking}};
  for (const int window_layers : {2, 4, kModelLayers / 2}) {
    ways.push_back({Kind::kVisiting, window_layers});
  }
  for (const Kind kind : {Kind::kTarget, Kind::kShared}) {
    if (kind == Kind::kShared && !training_) continue;
    for (const int percent : kTargetPercents) {
      ways.push_back({.kind = kind, .target_percent = percent});
    }
  }
  for (const WeightsWay& way : ways) {
    const uint64_t target_bytes = none.cost.peak_bytes * way.target_percent / 100;
    PINION_ASSIGN_OR_RETURN(const Outcome outcome, Run(way, target_bytes));
    add(way, outcome, target_bytes);
    if (!way.visits()) continue;
    WeightsRow& row = rows.back();
    row.bound = BoundOf(row, none);
    row.is_hidden = row.bound.overlapped_us <= kHidden * none.cost.compute_us;
  }
  return rows;
}

PhaseBound WeightsCase::BoundOf(const WeightsRow& row, const Outcome& none) const {
  if (row.way.kind == Kind::kShared) {
    return SharedBound(preset_.link, LayerBytes(), kModelLayers, none.others_bytes,
                       row.target_bytes, none.compute);
  }
  int window_layers = row.way.window_layers;
  if (row.way.kind == Kind::kTarget) {
    // Other memory peaks at the end of forward in training, at any time in inference.
    const uint64_t others_bytes =
        training_ ? none.others_bytes : none.cost.peak_bytes - kModelLayers * LayerBytes();
    const uint64_t left_bytes = row.target_bytes - std::min(row.target_bytes, others_bytes);
    window_layers = std::min(kModelLayers, static_cast<int>(left_bytes / LayerBytes()));
  }
  return training_
             ? TrainingBound(preset_.link, LayerBytes(), kModelLayers, window_layers, none.compute)
             : InferenceBound(preset_.link, LayerBytes(), kModelLayers, window_layers,
                              none.cost.compute_us);
}

}  // namespace pinion
