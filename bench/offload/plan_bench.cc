// Measures planning a step, and the overhead of recording one.
//
//   plan_bench                          planning (processor time), and recorded steps (modelled)
//   plan_bench --quick                  fewer records and repeats
//   plan_bench --json=FILE              rows, and the goals that they are judged by
//   plan_bench --benchmark_filter=auto
//
// docs/results/benchmarks.md says how to read it.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/bench_main.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/offload/offload_method.h"
#include "pinion/bench/offload/random_step.h"
#include "pinion/bench/offload/replayed_step.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/recomputation.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/plan_cache.h"
#include "pinion/engine/schedule/planned_schedule.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/programs/pool_options.h"

ABSL_FLAG(bool, quick, false, "fewer records and repeats");

namespace pinion {
namespace {

constexpr size_t kGoalUses = 5000;
constexpr char kPreset[] = "h100_pcie5";
// Bytes per unit in replayed steps, whose bytes are moved.
constexpr uint64_t kReplayedUnitBytes = 64 * kKiB;
constexpr uint64_t kUnitBytes = 4 * kMiB;

struct PlanCase {
  uint64_t seed = 0;  // of a random step; 0: a GPT's
  size_t uses = 0;
  enum class Target { kTight, kAuto, kTightWithSegments };  // kTight tries all plans
  Target target = Target::kTight;

  std::string record() const { return seed == 0 ? "gpt" : absl::StrCat("random", seed); }
  std::string Name() const {
    return absl::StrCat("plan/", record(), "/", uses, "_uses/", TargetName());
  }
  const char* TargetName() const {
    const char* const names[] = {"target", "auto", "segments"};
    return names[static_cast<int>(target)];
  }
};

struct PlanRow {
  PlanCase of;
  size_t uses = 0;
  size_t moves = 0;
  double plan_ms = 0;
};

// Modelled times of one step.
struct RecordedRow {
  std::string preset;
  size_t uses = 0;
  double recorded_us = 0;  // planned and recorded; reads the last record
  double planned_us = 0;   // planned
  double alone_us = 0;     // without offload

  double ratio() const { return recorded_us / planned_us; }
};

struct Ran {
  double us = 0;
  uint64_t events = 0;  // recorded
};

// Runs one step, and returns its effect on the device.
absl::StatusOr<Ran> RunOnce(ReplayedStep& step, const ReplayedStep::MakeScope& make_scope,
                            EmulatedMachine& machine) {
  const double begin_ms = machine.now_ms();
  const uint64_t events_before = machine.calls(DeviceCall::kRecordEvent);
  step.Run(make_scope);
  PINION_RETURN_IF_ERROR(machine.SynchronizeDevice(0));
  return Ran{.us = (machine.now_ms() - begin_ms) * 1e3,
             .events = machine.calls(DeviceCall::kRecordEvent) - events_before};
}

// Replays `step` within `target_bytes`. Recording costs two events per save and read, and the
// host's calls. Internal if recording was on or off against expectation.
absl::Status ReplayRecorded(const StepTrace& step, uint64_t target_bytes, const MethodWorld& world,
                            RecordedRow& row) {
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<EmulatedMachine> machine, NewMachine(world));
  PINION_ASSIGN_OR_RETURN(const std::unique_ptr<ReplayedStep> replayed,
                          ReplayedStep::Create(step, machine));
  OffloadOptions options;
  options.allocator = PoolWithoutWatermarks();
  options.link = world.link;
  options.memory_target_bytes = target_bytes;
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<OffloadSession> session,
                          OffloadSession::Create(options, EmulatedBackend(machine)));
  const auto scope = [&session] { return std::make_shared<OffloadScope>(session); };
  const auto none = []() -> std::shared_ptr<void> { return nullptr; };
  PINION_ASSIGN_OR_RETURN(const Ran alone, RunOnce(*replayed, none, *machine));
  Ran recorded, planned;
  // The session needs one unknown step and kKnownInARow known steps. The step after them reads the
  // last record.
  for (int i = 0; i < 1 + PlannedSchedule::kKnownInARow; ++i) {
    PINION_ASSIGN_OR_RETURN(recorded, RunOnce(*replayed, scope, *machine));
  }
  for (int i = 0; i < 2; ++i) {
    PINION_ASSIGN_OR_RETURN(planned, RunOnce(*replayed, scope, *machine));
  }
  if (recorded.events < planned.events + 2 * step.accesses.size()) {
    return absl::InternalError(absl::StrCat("a step was to be recorded, and then another one not: ",
                                            recorded.events, " events, then ", planned.events));
  }
  row.recorded_us = recorded.us;
  row.planned_us = planned.us;
  row.alone_us = alone.us;
  return absl::OkStatus();
}

std::vector<PlanCase> PlanCases(bool quick) {
  std::vector<PlanCase> cases;
  for (const size_t uses : {size_t{1000}, kGoalUses, size_t{20000}}) {
    if (quick && uses > kGoalUses) continue;
    for (const uint64_t seed : {0, 1, 2, 3}) {
      if (quick && seed > 1) continue;
      for (const auto target : {PlanCase::Target::kTight, PlanCase::Target::kAuto,
                                PlanCase::Target::kTightWithSegments}) {
        // Only the GPT's: the link has time for the others, which recompute nothing.
        const bool mixes = target == PlanCase::Target::kTightWithSegments;
        if (!mixes || seed == 0) cases.push_back({seed, uses, target});
      }
    }
  }
  return cases;
}

// A twentieth of what can leave above the least with which the step can be planned.
absl::StatusOr<uint64_t> TightBytes(const StepTrace& step, const LinkCalibration& link) {
  PINION_ASSIGN_OR_RETURN(const uint64_t least_bytes, LeastMemoryBytes(step));
  PINION_ASSIGN_OR_RETURN(const StepPlan all, PlanStep(step, UINT64_MAX / 2, link));
  return least_bytes + (all.peak_bytes - least_bytes) / 20;
}

// Makes each 25 saved tensors a segment, whose input is the last tensor of the one before.
void AddSegments(StepTrace& step) {
  constexpr uint32_t kObjects = 25;
  for (uint32_t use = 0; use < step.accesses.size(); ++use) {
    const uint32_t segment = step.accesses[use] / kObjects;
    if (segment >= step.segments.size()) step.segments.resize(segment + size_t{1});
    step.segments[segment].accesses.push_back(use);
  }
  for (uint32_t i = 0; i < step.segments.size(); ++i) {
    StepSegment& segment = step.segments[i];
    segment.before = {.other_bytes = step.intervals[segment.accesses.front()].other_bytes};
    if (i > 0) segment.inputs = {i * kObjects - 1};
  }
}

// Returns this thread's processor time: planning never waits, and other programs do not count.
double ProcessorSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

absl::StatusOr<PlanRow> Measure(const PlanCase& of, const LinkCalibration& link,
                                benchmark::State& state) {
  StepTrace step =
      of.seed == 0 ? GptLikeStep(of.uses, kUnitBytes) : RandomStepOfUses(of.seed, of.uses);
  const bool has_segments = of.target == PlanCase::Target::kTightWithSegments;
  if (has_segments) {
    AddSegments(step);
    if (RecomputableSegments(step).size() != step.segments.size()) {
      return absl::InternalError("a segment cannot be recomputed");
    }
  }
  TargetOptions options = {.link = link};
  if (of.target != PlanCase::Target::kAuto) {
    PINION_ASSIGN_OR_RETURN(options.memory_bytes, TightBytes(step, link));
  }
  const PlannedSchedule schedule(options);
  PlanRow row = {.of = of, .uses = step.accesses.size()};
  std::vector<double> times_ms;
  for ([[maybe_unused]] auto _ : state) {
    const double begin_s = ProcessorSeconds();
    PINION_ASSIGN_OR_RETURN(const std::shared_ptr<const CachedPlan> known,
                            schedule.Plan(step, has_segments));
    const double elapsed_s = ProcessorSeconds() - begin_s;
    state.SetIterationTime(elapsed_s);
    times_ms.push_back(elapsed_s * 1e3);
    PINION_RETURN_IF_ERROR(known->shortfall());
    row.moves = known->plan().moves.size();
  }
  if (row.moves == 0) return absl::InternalError("nothing moves, so there was nothing to plan");
  row.plan_ms = Summarize(std::move(times_ms)).median;
  state.counters["moves"] = static_cast<double>(row.moves);
  return row;
}

absl::StatusOr<RecordedRow> MeasureRecorded(const std::string& preset, size_t uses,
                                            benchmark::State& state) {
  RecordedRow row = {.preset = preset};
  const StepTrace step = GptLikeStep(uses, kReplayedUnitBytes);
  MethodWorld world;
  PINION_ASSIGN_OR_RETURN(const DevicePreset whole, FindPreset(preset));
  world.preset =
      ScalePreset(whole, {.flops_per_saved_byte = 1, .mean_saved_tensor_bytes = kUnitBytes},
                  {.flops_per_saved_byte = 1, .mean_saved_tensor_bytes = kReplayedUnitBytes});
  world.preset.launch_us = 0;  // part of the step
  PINION_ASSIGN_OR_RETURN(world.link, LinkOf(world.preset));
  PINION_ASSIGN_OR_RETURN(const uint64_t target_bytes, TightBytes(step, world.link));
  for ([[maybe_unused]] auto _ : state) {
    PINION_RETURN_IF_ERROR(ReplayRecorded(step, target_bytes, world, row));
    state.SetIterationTime(row.recorded_us * 1e-6);
  }
  row.uses = step.accesses.size();
  state.counters["ratio"] = row.ratio();
  return row;
}

BenchReport PlanReport(const std::vector<PlanRow>& rows, const std::vector<RecordedRow>& recorded) {
  BenchReport report;
  for (const PlanRow& row : rows) {
    report.AddRow({{"case", row.of.Name()},
                   {"record", row.of.record()},
                   {"uses", row.uses},
                   {"target", row.of.TargetName()},
                   {"moves", row.moves},
                   {"plan_ms", row.plan_ms}});
  }
  for (const RecordedRow& row : recorded) {
    report.AddRow({{"case", absl::StrCat("recorded/", row.preset, "/", row.uses, "_uses")},
                   {"preset", row.preset},
                   {"uses", row.uses},
                   {"recorded_us", row.recorded_us},
                   {"planned_us", row.planned_us},
                   {"alone_us", row.alone_us},
                   {"ratio", row.ratio()},
                   {"modelled", true}});
  }
  const auto add_goal = [&](PlanCase::Target target, const char* what, double most_ms) {
    report.AddGoal(absl::StrCat("planning ", kGoalUses, " uses ", what, ", ms"), AtMost(most_ms),
                   rows, [target](const PlanRow& row) {
                     const bool counts = row.of.uses == kGoalUses && row.of.target == target;
                     return counts ? std::optional(row.plan_ms) : std::nullopt;
                   });
  };
  add_goal(PlanCase::Target::kTight, "within a target", 20);
  add_goal(PlanCase::Target::kAuto, "with kAutoTarget", 20);
  add_goal(PlanCase::Target::kTightWithSegments, "with 100 segments", 100);
  report.AddGoal("a recorded step over the same one that is not recorded (modelled)", AtMost(1.05),
                 recorded, [](const RecordedRow& row) { return std::optional(row.ratio()); });
  return report;
}

absl::Status Run(BenchReport& report) {
  const bool quick = absl::GetFlag(FLAGS_quick);
  PINION_ASSIGN_OR_RETURN(const DevicePreset preset, FindPreset(kPreset));
  PINION_ASSIGN_OR_RETURN(const LinkCalibration link, LinkOf(preset));
  std::vector<PlanRow> rows;
  std::vector<RecordedRow> recorded;
  CheckedBenchmarks benchmarks;
  for (const PlanCase& of : PlanCases(quick)) {
    const int repeats = quick ? 3 : of.uses > kGoalUses ? 5 : 15;
    benchmarks.Register(of.Name(), benchmark::kMillisecond, repeats,
                        [&rows, &link, of](benchmark::State& state) -> absl::Status {
                          PINION_ASSIGN_OR_RETURN(const PlanRow row, Measure(of, link, state));
                          rows.push_back(row);
                          return absl::OkStatus();
                        });
  }
  for (const std::string& name : PresetNames()) {
    if (quick && name != kPreset) continue;
    constexpr size_t kUses = 1000;
    benchmarks.Register(absl::StrCat("recorded/", name, "/", kUses, "_uses"),
                        benchmark::kMillisecond, /*iterations=*/1,  // modelled: the same each time
                        [&recorded, name](benchmark::State& state) -> absl::Status {
                          PINION_ASSIGN_OR_RETURN(const RecordedRow row,
                                                  MeasureRecorded(name, kUses, state));
                          recorded.push_back(row);
                          return absl::OkStatus();
                        });
  }
  return benchmarks.Run([&] { report = PlanReport(rows, recorded); });
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  return pinion::BenchmarksMain(argc, argv, "plan_bench", "what planning a step costs",
                                pinion::Run);
}
