// Compares attribution to all blocks of a model by Captum and by Pinion: device memory, time,
// copies.
//
//   attribution_bench                       every model on every preset of the emulated device
//   attribution_bench --quick               one model, two presets
//   attribution_bench --models=unet --presets=a100_pcie4
//   attribution_bench --json=FILE
//
// docs/results/benchmarks.md says how to read it.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/attribution/attribution_case.h"
#include "pinion/bench/attribution/attribution_table.h"
#include "pinion/bench/attribution/captum_baseline.h"
#include "pinion/bench/bench_main.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/offload/offload_model.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/path_methods.h"

ABSL_FLAG(std::vector<std::string>, models, {}, "gpt, convnet, unet; default: all");
ABSL_FLAG(std::vector<std::string>, presets, {}, "of the emulated device; default: all");
ABSL_FLAG(bool, quick, false, "one model, two presets");

namespace pinion {
namespace {

// The middle layer.
constexpr char kLayer[] = "blocks.3";
constexpr int64_t kExamples = 2;
// A CPU computes hundreds of 16 x 16 pictures in seconds.
constexpr int64_t kSide = 16;

// {steps, steps of the budget}. Cases that fit at once come first.
constexpr std::pair<int64_t, int64_t> kSteps[] = {{8, 8}, {32, 32}, {32, 8}, {128, 8}, {128, 32}};
constexpr int64_t kMostQuickSteps = 32;

at::Tensor RunPinion(AttributionSession& session, const AttributedForward& forward,
                     const PathWay& way, const CaptumPathCall& call, uint64_t budget_bytes) {
  const std::vector<std::string> layers = {kLayer};
  const std::vector<at::Tensor> inputs = {call.input};
  PathOptions options;
  options.n_steps = way.n_steps;
  options.device_budget_bytes = budget_bytes;
  switch (way.method) {
    case PathMethod::kIntegratedGradients:
      return IntegratedGradients(session, forward, inputs, call.target, options)[0];
    case PathMethod::kLayerIntegratedGradients:
      return LayerIntegratedGradients(session, forward, layers, inputs, call.target, options)[0]
          .tensors[0];
    case PathMethod::kLayerConductance:
      return LayerConductance(session, forward, layers, inputs, call.target, options)[0].tensors[0];
  }
  return {};
}

class PathRuns {
 public:
  PathRuns(OffloadModel model, std::string preset_name, DevicePreset preset)
      : model_(model), preset_name_(std::move(preset_name)), preset_(std::move(preset)) {}

  // Adds Captum's row and Pinion's.
  absl::Status Add(PathWay way) {
    PINION_RETURN_IF_ERROR(AddRow(way));
    way.is_pinion = true;
    return AddRow(way);
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

// Returns whether paths are measured: for the float32 residual network, whose sums can be compared.
bool HasPaths(const OffloadModel& model) {
  return model.kind == OffloadModel::Kind::kConvNet && !model.autocast;
}

// Runs methods along a path within a device budget, for one layer of a small residual network. A
// budget is Captum's peak for one batch of some steps. For more steps, Captum gets the largest
// internal_batch_size that fits. Pinion gets the budget alone. `quick` measures fewer steps.
// NotFound names all presets.
absl::StatusOr<std::vector<PathRow>> RunPaths(const OffloadModel& model, const std::string& preset,
                                              bool quick) {
  PINION_ASSIGN_OR_RETURN(DevicePreset scaled, PresetFor(model, preset));
  PathRuns runs(model, preset, std::move(scaled));
  for (const PathMethod method :
       {PathMethod::kIntegratedGradients, PathMethod::kLayerIntegratedGradients,
        PathMethod::kLayerConductance}) {
    for (const auto& [steps, budget_steps] : kSteps) {
      if (quick && steps > kMostQuickSteps) continue;
      PINION_RETURN_IF_ERROR(runs.Add({method, steps, budget_steps}));
    }
  }
  return runs.TakeRows();
}

absl::Status Run(BenchReport& report) {
  const bool quick = absl::GetFlag(FLAGS_quick);
  PINION_ASSIGN_OR_RETURN(
      const ModelsToRun run,
      FindModelsToRun(absl::GetFlag(FLAGS_models), absl::GetFlag(FLAGS_presets), quick));
  AttributionTable table;
  const auto add = [&report](const auto& rows, auto& all) {
    AddRows(rows, report);
    report.PrintRows();
    all.insert(all.end(), rows.begin(), rows.end());
  };
  for (const OffloadModel& model : run.models) {
    for (const std::string& preset : run.presets) {
      PINION_ASSIGN_OR_RETURN(const std::vector<AttributionRow> rows, RunWays(model, preset));
      add(rows, table.rows);
      if (!HasPaths(model)) continue;
      PINION_ASSIGN_OR_RETURN(const std::vector<PathRow> paths, RunPaths(model, preset, quick));
      add(paths, table.paths);
    }
  }
  AddAttributionGoals(table, report);
  return absl::OkStatus();
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  return pinion::BenchMain(argc, argv, "attribution_bench", "the cost of attribution", pinion::Run);
}
