// Compares methods of offloading by a training step's time and device memory. Steps are recorded,
// then replayed without values; a plan that recomputes is replayed as the record it rewrites.
//
//   offload_bench                       every model on every preset of the emulated device: minutes
//   offload_bench --quick               one model, two presets, two targets
//   offload_bench --models=unet --presets=a100_pcie4
//   offload_bench --json=FILE
//
// docs/results/benchmarks.md says how to read it.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/bench_main.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/offload/offline_plan.h"
#include "pinion/bench/offload/offload_method.h"
#include "pinion/bench/offload/offload_model.h"
#include "pinion/bench/offload/offload_table.h"
#include "pinion/bench/offload/replayed_step.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/recompute_plan.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/programs/step_bound.h"

ABSL_FLAG(std::vector<std::string>, models, {}, "gpt, convnet, unet; default: all");
ABSL_FLAG(std::vector<std::string>, presets, {}, "of the emulated device; default: all");
ABSL_FLAG(bool, quick, false, "one model, two presets, two targets");
ABSL_FLAG(bool, values, true, "also runs each method once with values, and compares gradients");

namespace pinion {
namespace {

using Kind = OffloadMethod::Kind;

constexpr int kTargets = 6;
constexpr int kTargetsIfQuick = 2;
// A recorder's hooks may keep a few small tensors alive at the peak.
constexpr uint64_t kRecordersBytes = 4 * kKiB;
constexpr PlanSearch kSearch = {};

c10::Device Emu() { return {DeviceTypeOf("emu").value(), 0}; }

// A step of a model on a preset, and the inputs that its runs share.
struct Case {
  OffloadModel model;
  std::string preset;
  StepTrace step;
  StepTrace checkpointed;  // the step if each block of the model is a checkpoint
  StepTrace segmented;     // the step if a plan may compute each block again: all is kept
  MethodWorld world;
  double alone_us = 0;
  uint64_t all_bytes = 0;    // device peak if nothing is offloaded
  uint64_t least_bytes = 0;  // if everything is offloaded
  uint64_t segmented_least_bytes = 0;

  // Without what is computed again by plan.
  const StepTrace& StepOf(const OffloadMethod& method) const {
    if (method.kind == Kind::kPlannedRecompute) return segmented;
    return method.kind == Kind::kCheckpoint ? checkpointed : step;
  }
};

absl::StatusOr<StepTrace> RecordModel(const OffloadModel& model, const DevicePreset& preset,
                                      bool checkpoints, bool keep_checkpoints = false) {
  StepTrace record;
  MethodWorld world;
  world.preset = preset;
  PINION_RETURN_IF_ERROR(
      RunMethod(
          {}, world,
          [&](const std::shared_ptr<EmulatedMachine>& machine) -> absl::StatusOr<OffloadStep> {
            ModelStep step(PutModelOn(model, Emu(), checkpoints));
            // The first run fills pools: later the device does not idle for allocations.
            step.Run([] { return nullptr; });
            PINION_ASSIGN_OR_RETURN(record,
                                    step.Record(EmulatedBackend(machine), keep_checkpoints));
            return OffloadStep{[](const ReplayedStep::MakeScope&) {}, {}};
          })
          .status());
  return record;
}

class OffloadBench {
 public:
  OffloadBench(bool quick, BenchReport& report) : quick_(quick), report_(report) {}

  absl::Status Run(const OffloadModel& model, const std::string& preset) {
    PINION_ASSIGN_OR_RETURN(const Case of, Prepare(model, preset));
    const size_t before = table_.rows.size();
    for (const OffloadMethod& method : AllMethods()) {
      PINION_RETURN_IF_ERROR(AddRow(of, method, std::nullopt));
    }
    const size_t methods_end = table_.rows.size();
    const int targets = quick_ ? kTargetsIfQuick : kTargets;
    for (int i = 0; i < targets; ++i) {
      const uint64_t more = (of.all_bytes - of.least_bytes) / (targets - 1) * (targets - 1 - i);
      PINION_RETURN_IF_ERROR(
          AddPlanned(of, i == 0 ? of.all_bytes : of.least_bytes + more, std::nullopt));
    }
    for (size_t i = before; i < methods_end; ++i) {
      const OffloadRow peer = table_.rows[i];
      if (peer.method.kind == Kind::kNone || peer.method.kind == Kind::kBlocking) continue;
      PINION_RETURN_IF_ERROR(AddPlanned(of, peer.cost.peak_bytes, peer.method.kind));
    }
    report_.PrintRows();
    return absl::OkStatus();
  }

  // Compares gradients of each method with those without offload.
  absl::Status RunValues(const OffloadModel& model, const std::string& preset) {
    PINION_ASSIGN_OR_RETURN(const Case of, Prepare(model, preset));
    std::vector<at::Tensor> expected;
    std::vector<OffloadMethod> methods = AllMethods();
    for (const Kind kind : {Kind::kPlanned, Kind::kPlannedRecompute}) {
      methods.push_back({kind, of.least_bytes + (of.all_bytes - of.least_bytes) / 4});
    }
    for (const OffloadMethod& method : methods) {
      std::vector<at::Tensor> gradients;
      PINION_ASSIGN_OR_RETURN(
          const MethodCost cost,
          RunMethod(method, of.world,
                    [&](const std::shared_ptr<EmulatedMachine>&) -> absl::StatusOr<OffloadStep> {
                      const bool checkpoints = method.kind == Kind::kCheckpoint ||
                                               method.kind == Kind::kPlannedRecompute;
                      const auto step =
                          std::make_shared<ModelStep>(PutModelOn(model, Emu(), checkpoints));
                      return OffloadStep{
                          [step, &gradients](const ReplayedStep::MakeScope& make_scope) {
                            step->Run(make_scope);
                            gradients = step->Gradients();
                          },
                          step->Parameters()};
                    }));
      PINION_RETURN_IF_ERROR(CheckPeak(of, method, cost, kRecordersBytes));
      if (method.kind == Kind::kNone) expected = gradients;
      table_.values.push_back({.model = model.name(),
                               .preset = preset,
                               .method = method,
                               .cost = cost,
                               .same_bits = SameBits(gradients, expected)});
      report_.AddRow(JsonOf(table_.values.back()));
    }
    report_.PrintRows();
    return absl::OkStatus();
  }

  OffloadTable& table() { return table_; }

 private:
  absl::StatusOr<Case> Prepare(const OffloadModel& model, const std::string& preset) {
    Case of;
    of.model = model;
    of.preset = preset;
    PINION_ASSIGN_OR_RETURN(of.world.preset, PresetFor(model, preset));
    PINION_ASSIGN_OR_RETURN(of.step, RecordModel(model, of.world.preset, /*checkpoints=*/false));
    PINION_ASSIGN_OR_RETURN(of.checkpointed,
                            RecordModel(model, of.world.preset, /*checkpoints=*/true));
    PINION_ASSIGN_OR_RETURN(of.segmented, RecordModel(model, of.world.preset, /*checkpoints=*/true,
                                                      /*keep_checkpoints=*/true));
    // Recorded times include launches.
    of.world.preset.launch_us = 0;
    PINION_ASSIGN_OR_RETURN(of.world.link, LinkOf(of.world.preset));
    PINION_ASSIGN_OR_RETURN(of.least_bytes, LeastMemoryBytes(of.step));
    PINION_ASSIGN_OR_RETURN(of.segmented_least_bytes, LeastMemoryBytes(of.segmented));
    PINION_ASSIGN_OR_RETURN(const MethodCost alone, Replay(of, {}, of.step));
    of.alone_us = alone.step_us;
    of.all_bytes = alone.peak_bytes;
    return of;
  }

  // Checks that a step without offload has its record's peak, replayed or with values.
  static absl::Status CheckPeak(const Case& of, const OffloadMethod& method, const MethodCost& cost,
                                uint64_t tolerance_bytes) {
    if (method.kind != Kind::kNone && method.kind != Kind::kCheckpoint) return absl::OkStatus();
    PINION_ASSIGN_OR_RETURN(const StepPlan all,
                            PlanStep(of.StepOf(method), UINT64_MAX / 2, of.world.link));
    const auto [less, more] = std::minmax(cost.peak_bytes, all.peak_bytes);
    if (more - less <= tolerance_bytes) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(of.model.name(), ", ", method.name(),
                                            ": the step has a peak of ", cost.peak_bytes,
                                            " bytes, its record one of ", all.peak_bytes));
  }

  // Checks Pinion's methods without recomputation. Peers may copy earlier than the bound allows.
  static absl::Status CheckBound(const OffloadRow& row) {
    if (!row.planned() && row.method.kind != Kind::kWindows) return absl::OkStatus();
    const double us = std::min(row.cost.step_us, row.offline_us.value_or(row.cost.step_us));
    if (us >= (1 - 1e-9) * row.bound_us) return absl::OkStatus();
    return absl::InternalError(
        absl::StrFormat("%s on %s, %s: a step or plan of %.3f us is below the bound of %.3f us",
                        row.model, row.preset, row.method.name(), us, row.bound_us));
  }

  static std::vector<OffloadMethod> AllMethods() {
    return {{Kind::kNone}, {Kind::kBlocking}, {Kind::kTrl}, {Kind::kWindows}, {Kind::kCheckpoint}};
  }

  absl::StatusOr<MethodCost> Replay(const Case& of, const OffloadMethod& method,
                                    const StepTrace& record) const {
    return RunMethod(method, of.world, ReplayOf(record));
  }

  // Adds the planned methods that can run within the target.
  absl::Status AddPlanned(const Case& of, uint64_t target_bytes,
                          std::optional<Kind> at_the_peak_of) {
    // A method that recomputes every block is compared with plans that recompute some.
    if (at_the_peak_of != Kind::kCheckpoint && target_bytes >= of.least_bytes) {
      PINION_RETURN_IF_ERROR(AddRow(of, {Kind::kPlanned, target_bytes}, at_the_peak_of));
    }
    // A block that may be recomputed keeps its inputs until its forward ends.
    if (target_bytes < of.segmented_least_bytes) return absl::OkStatus();
    return AddRow(of, {Kind::kPlannedRecompute, target_bytes}, at_the_peak_of);
  }

  absl::Status AddRow(const Case& of, const OffloadMethod& method,
                      std::optional<Kind> at_the_peak_of) {
    OffloadRow row;
    row.model = of.model.name();
    row.preset = of.preset;
    row.method = method;
    row.alone_us = of.alone_us;
    row.at_the_peak_of = at_the_peak_of;
    const bool recomputes = method.kind == Kind::kPlannedRecompute;
    RecomputePlan recompute;
    if (recomputes) {
      PINION_ASSIGN_OR_RETURN(recompute,
                              PlanWithRecomputation(of.segmented, method.bytes, of.world.link));
      row.computed_again = recompute.segments.size();
    }
    PINION_ASSIGN_OR_RETURN(row.cost,
                            Replay(of, method, recomputes ? recompute.step : of.StepOf(method)));
    PINION_RETURN_IF_ERROR(CheckPeak(of, method, row.cost, 0));
    const uint64_t memory_bytes = method.has_target() ? method.bytes : row.cost.peak_bytes;
    PINION_ASSIGN_OR_RETURN(row.bound_us, StepLowerBoundUs(of.step, memory_bytes, of.world.link));
    if (row.planned() && memory_bytes < of.all_bytes) {
      PINION_ASSIGN_OR_RETURN(StepPlan plan, PlanStep(of.step, memory_bytes, of.world.link));
      if (row.bound_us < OffloadRow::kNearBound * plan.step_us) {
        PINION_ASSIGN_OR_RETURN(plan, SearchPlan(of.step, memory_bytes, of.world.link, kSearch));
      }
      row.offline_us = plan.step_us;
    }
    PINION_RETURN_IF_ERROR(CheckBound(row));
    report_.AddRow(JsonOf(row));
    table_.rows.push_back(std::move(row));
    return absl::OkStatus();
  }

  const bool quick_;
  BenchReport& report_;
  OffloadTable table_;
};

absl::Status Run(BenchReport& report) {
  const auto begin = std::chrono::steady_clock::now();
  const bool quick = absl::GetFlag(FLAGS_quick);
  PINION_ASSIGN_OR_RETURN(
      const ModelsToRun run,
      FindModelsToRun(absl::GetFlag(FLAGS_models), absl::GetFlag(FLAGS_presets), quick));
  OffloadBench bench(quick, report);
  for (const OffloadModel& model : run.models) {
    for (const std::string& preset : run.presets) PINION_RETURN_IF_ERROR(bench.Run(model, preset));
    if (absl::GetFlag(FLAGS_values)) {
      PINION_RETURN_IF_ERROR(bench.RunValues(model, run.presets.front()));
    }
  }
  bench.table().minutes =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / 60;
  AddOffloadGoals(bench.table(), report);
  return absl::OkStatus();
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  return pinion::BenchMain(argc, argv, "offload_bench", "the cost of offloading, by method",
                           pinion::Run);
}
