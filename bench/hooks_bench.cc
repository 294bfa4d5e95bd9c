// Measures the host's cost of a saved tensor: pack, unpack and release, on a device that does
// nothing. Steps without hooks, with hooks that do nothing and with a session take turns.
//
//   hooks_bench                         everything, wall time
//   hooks_bench --quick                 fewer tensors and repeats
//   hooks_bench --json=FILE             rows, and the goals that they are judged by
//   hooks_bench --benchmark_filter=1MiB
//
// docs/results/benchmarks.md says how to read it.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/ram/ram_probe.h"
#include "pinion/bench/bench_main.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/null_device.h"
#include "pinion/bench/null_torch_device.h"
#include "pinion/device/device.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"

ABSL_FLAG(bool, quick, false, "fewer tensors and repeats");

namespace pinion {
namespace {

constexpr int kFewTensors = 100;
constexpr int kManyTensors = 5000;
constexpr uint64_t kSmallBytes = 4 * kKiB;

struct HooksCase {
  SavingStep step;
  bool leaves = false;  // whether tensors beyond the window are evicted
  int threads = 1;

  std::string Name() const {
    return absl::StrCat(leaves ? "leaves" : "fits", "/", step.tensors, "x",
                        absl::StrReplaceAll(HumanBytes(step.tensor_bytes), {{" ", ""}}), "/",
                        threads, threads == 1 ? "_thread" : "_threads");
  }
};

struct HooksRow {
  HooksCase of;
  // Wall time of a step, per tensor.
  double none_us = 0;
  double nothing_us = 0;  // hooks that do nothing, less none_us
  double pinion_us = 0;   // less none_us
  double device_calls = 0;
  double capture_queries = 0;
};

std::vector<HooksCase> Cases(bool quick) {
  std::vector<HooksCase> cases;
  for (const bool leaves : {false, true}) {
    for (const uint64_t tensor_bytes : {kSmallBytes, kMiB, 64 * kMiB}) {
      for (const int tensors : {kFewTensors, 1000, kManyTensors}) {
        if (quick && tensors == kManyTensors) continue;
        for (const int threads : {1, 2}) {
          cases.push_back({{tensors, tensor_bytes}, leaves, threads});
        }
      }
    }
  }
  return cases;
}

OffloadOptions Windows(bool leaves) {
  OffloadOptions options;
  // Larger than all tensors, and not the value that lets the session choose.
  if (!leaves) options.eviction_window_bytes = OffloadOptions::kAutoWindow / 2;
  return options;
}

absl::StatusOr<std::shared_ptr<OffloadSession>> NewSession(OffloadOptions options,
                                                           std::shared_ptr<Device> device) {
  options.link = AssumedLink();
  PINION_ASSIGN_OR_RETURN(
      std::shared_ptr<PinnedAllocator> allocator,
      PinnedAllocator::Create({}, device->pinned_source(), RamProbe("/none", "/none", "/none/")));
  const DeviceBackend backend = {kNullTorchDevice, [device](int) { return device; }, device.get()};
  return OffloadSession::Create(options, backend, std::move(allocator));
}

// Other programs only add time, and the results are hundreds of nanoseconds.
double LowerQuartile(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return Quantile(values, 0.25);
}

// Runs a step on each thread at once and adds their times.
void RunSteps(const HooksCase& of, const SavingStep::MakeScope& make_scope,
              std::vector<double>& times_us) {
  std::vector<double> times(of.threads);
  std::barrier together(of.threads);
  const auto run = [&](int thread) {
    together.arrive_and_wait();
    times[thread] = of.step.RunUs(make_scope);
  };
  std::vector<std::thread> threads;
  for (int thread = 1; thread < of.threads; ++thread) threads.emplace_back(run, thread);
  run(0);
  for (std::thread& thread : threads) thread.join();
  times_us.insert(times_us.end(), times.begin(), times.end());
}

// Checks that the case did what its name says.
absl::Status CheckStats(const HooksCase& of, const OffloadStats& stats) {
  const double bytes = static_cast<double>(stats.offloaded_bytes);
  const double evicted = static_cast<double>(stats.evicted_bytes) / bytes;
  const bool as_named =
      of.leaves ? evicted > 0.8 && stats.fetched_bytes > 0.8 * bytes : stats.evicted_bytes == 0;
  if (stats.offloaded > 0 && stats.kept() == 0 && stats.offloaded == stats.unpacked && as_named)
    return absl::OkStatus();
  return absl::InternalError(absl::StrCat("not what the case says: ", stats.ToString()));
}

// Wall time of a whole step; the lower quartile of all repeats.
struct RecordedStepCost {
  SavingStep step;
  double recorded_us = 0;      // planned and recorded
  double planned_us = 0;       // the same step, planned only
  double recorded_events = 0;  // events per tensor
  double planned_events = 0;

  double ratio() const { return recorded_us / planned_us; }
  nlohmann::ordered_json ToRow() const {
    return {{"case", absl::StrCat("recorded/", step.tensors, "/", step.tensor_bytes)},
            {"tensors", step.tensors},
            {"tensor_bytes", step.tensor_bytes},
            {"recorded_us", recorded_us / step.tensors},
            {"planned_us", planned_us / step.tensors},
            {"ratio", ratio()},
            {"recorded_events", recorded_events},
            {"planned_events", planned_events}};
  }
};

// Alternates two kinds of steps: a large one, and a small one, whose begin reads and plans the
// large one's record.
struct TurnTaker {
  // The target has room for half of the saved bytes.
  static absl::StatusOr<TurnTaker> Create(const SavingStep& step, std::shared_ptr<Device> device) {
    OffloadOptions options;
    options.memory_target_bytes = step.tensors * step.tensor_bytes / 2;
    PINION_ASSIGN_OR_RETURN(std::shared_ptr<OffloadSession> session,
                            NewSession(options, std::move(device)));
    const auto scope = [session] { return std::make_shared<OffloadScope>(session); };
    return TurnTaker{step, {.tensors = 1, .tensor_bytes = step.tensor_bytes}, scope};
  }

  double LargeUs() const { return large.RunUs(scope); }
  // Afterwards both are known. The next large step is the last recorded one.
  void BeginToKnow() const {
    LargeUs();
    small.RunUs(scope);
  }
  // Afterwards neither step is recorded.
  void KnowWell() const {
    for (int i = 0; i < 3; ++i) BeginToKnow();
  }

  const SavingStep large;
  const SavingStep small;
  const SavingStep::MakeScope scope;
};

// Measures what recording costs a step. Internal if recording was on or off against expectation.
absl::StatusOr<RecordedStepCost> MeasureRecordedStep(const SavingStep& step, int repeats) {
  RecordedStepCost cost;
  cost.step = step;
  const auto device = std::make_shared<NullDevice>(NullDevice::Events::kDone, /*counts=*/true);
  PINION_ASSIGN_OR_RETURN(const TurnTaker counted, TurnTaker::Create(step, device));
  counted.BeginToKnow();
  // Counts in a separate run, since counting takes time.
  const auto events = [&] {
    const uint64_t before = device->calls().events;
    counted.LargeUs();
    return static_cast<double>(device->calls().events - before) / step.tensors;
  };
  cost.recorded_events = events();
  counted.KnowWell();
  cost.planned_events = events();
  // Each save and each read lies between two events.
  if (cost.recorded_events < cost.planned_events + 4) {
    return absl::InternalError(
        absl::StrCat("a step was to be recorded, and then another one not: ", cost.recorded_events,
                     " events a tensor, then ", cost.planned_events));
  }
  std::vector<double> recorded_us, planned_us;
  for (int i = 0; i < repeats; ++i) {
    const auto null = [] { return std::make_shared<NullDevice>(NullDevice::Events::kDone); };
    PINION_ASSIGN_OR_RETURN(const TurnTaker knows, TurnTaker::Create(step, null()));
    PINION_ASSIGN_OR_RETURN(const TurnTaker learns, TurnTaker::Create(step, null()));
    knows.KnowWell();
    learns.BeginToKnow();
    recorded_us.push_back(learns.LargeUs());
    planned_us.push_back(knows.LargeUs());
  }
  cost.recorded_us = LowerQuartile(std::move(recorded_us));
  cost.planned_us = LowerQuartile(std::move(planned_us));
  return cost;
}

BenchReport HooksReport(const std::vector<HooksRow>& rows,
                        const std::vector<RecordedStepCost>& recorded) {
  BenchReport report;
  // The median of all rows: caches hide this tenth of a microsecond in some rows, and hooks that do
  // nothing cost the same in all.
  std::vector<double> all_nothing_us;
  for (const HooksRow& row : rows) all_nothing_us.push_back(row.nothing_us);
  const double nothing_us = rows.empty() ? 0 : Summarize(std::move(all_nothing_us)).median;
  // Returns nullopt if noise made the baseline zero or less.
  const auto over = [](double us, double baseline_us) -> std::optional<double> {
    if (baseline_us <= 0) return std::nullopt;
    return us / baseline_us;
  };
  const auto ratio = [&](const HooksRow& row) { return over(row.pinion_us, nothing_us); };
  for (const HooksRow& row : rows) {
    report.AddRow({{"case", row.of.Name()},
                   {"leaves", row.of.leaves},
                   {"tensors", row.of.step.tensors},
                   {"tensor_bytes", row.of.step.tensor_bytes},
                   {"threads", row.of.threads},
                   {"none_us", row.none_us},
                   {"nothing_us", row.nothing_us},
                   {"pinion_us", row.pinion_us},
                   {"ratio", ratio(row).value_or(0)},
                   {"device_calls", row.device_calls},
                   {"capture_queries", row.capture_queries}});
  }
  report.AddGoal("a saved tensor: Pinion's hooks over hooks that do nothing", AtMost(10), rows,
                 ratio);
  report.AddGoal(absl::StrCat("a saved tensor of ", kManyTensors, " over one of ", kFewTensors),
                 AtMost(1.2), rows, [&](const HooksRow& many) -> std::optional<double> {
                   if (many.of.step.tensors != kManyTensors) return std::nullopt;
                   HooksCase few = many.of;
                   few.step.tensors = kFewTensors;
                   for (const HooksRow& row : rows) {
                     if (row.of.Name() == few.Name()) return over(many.pinion_us, row.pinion_us);
                   }
                   return std::nullopt;
                 });
  const auto of_size = [](bool small, double HooksRow::*field) {
    return [=](const HooksRow& row) -> std::optional<double> {
      if ((row.of.step.tensor_bytes == kSmallBytes) != small) return std::nullopt;
      return row.*field;
    };
  };
  for (const bool small : {false, true}) {
    const std::string tensor = small ? "a small tensor" : "a large tensor";
    report.AddGoal("events, waits and copies of " + tensor, AtMost(small ? 2 : 10), rows,
                   of_size(small, &HooksRow::device_calls));
    report.AddGoal("capture queries of " + tensor, AtMost(small ? 0.2 : 1), rows,
                   of_size(small, &HooksRow::capture_queries));
  }
  for (const RecordedStepCost& cost : recorded) report.AddRow(cost.ToRow());
  report.AddGoal("a recorded step over the same one that is not recorded (host)", AtMost(1.05),
                 recorded,
                 [](const RecordedStepCost& cost) { return std::optional(cost.ratio()); });
  return report;
}

// Counts a step's calls of the device in a separate session, since counting takes time.
absl::StatusOr<NullDevice::Calls> CallsOf(const HooksCase& of) {
  const auto device = std::make_shared<NullDevice>(NullDevice::Events::kDone, /*counts=*/true);
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<OffloadSession> session,
                          NewSession(Windows(of.leaves), device));
  const auto scope = [&session] { return std::make_shared<OffloadScope>(session); };
  of.step.RunUs(scope);  // warms up
  const NullDevice::Calls before = device->calls();
  of.step.RunUs(scope);
  const NullDevice::Calls after = device->calls();
  return NullDevice::Calls{.events = after.events - before.events,
                           .copies = after.copies - before.copies,
                           .capture_queries = after.capture_queries - before.capture_queries};
}

absl::StatusOr<HooksRow> Measure(const HooksCase& of, benchmark::State& state) {
  PINION_ASSIGN_OR_RETURN(
      const std::shared_ptr<OffloadSession> session,
      NewSession(Windows(of.leaves), std::make_shared<NullDevice>(NullDevice::Events::kDone)));
  const auto none = []() -> std::shared_ptr<void> { return nullptr; };
  const auto pinion = [&session] { return std::make_shared<OffloadScope>(session); };
  std::vector<double> warm_up;
  for (int i = 0; i < 2; ++i) RunSteps(of, pinion, warm_up);
  std::vector<double> none_us, nothing_us, pinion_us;
  // In turn, so that a slow machine slows all of them.
  for ([[maybe_unused]] auto _ : state) {
    RunSteps(of, none, none_us);
    RunSteps(of, HooksThatDoNothing, nothing_us);
    RunSteps(of, pinion, pinion_us);
    state.SetIterationTime(pinion_us.back() * 1e-6);
  }
  PINION_RETURN_IF_ERROR(CheckStats(of, session->GetStats()));
  HooksRow row = {.of = of, .none_us = LowerQuartile(none_us) / of.step.tensors};
  row.nothing_us = LowerQuartile(nothing_us) / of.step.tensors - row.none_us;
  row.pinion_us = LowerQuartile(pinion_us) / of.step.tensors - row.none_us;
  PINION_ASSIGN_OR_RETURN(const NullDevice::Calls calls, CallsOf(of));
  row.device_calls = static_cast<double>(calls.events + calls.copies) / of.step.tensors;
  row.capture_queries = static_cast<double>(calls.capture_queries) / of.step.tensors;
  state.counters["none_us"] = row.none_us;
  state.counters["nothing_us"] = row.nothing_us;
  state.counters["pinion_us"] = row.pinion_us;
  state.counters["calls"] = row.device_calls;
  state.counters["captures"] = row.capture_queries;
  return row;
}

absl::Status Run(BenchReport& report) {
  const bool quick = absl::GetFlag(FLAGS_quick);
  RegisterNullTorchDevice();
  std::vector<HooksRow> rows;
  std::vector<RecordedStepCost> recorded;
  CheckedBenchmarks benchmarks;
  for (const HooksCase& of : Cases(quick)) {
    const int repeats = quick ? 5 : of.step.tensors == kFewTensors ? 101 : 21;
    benchmarks.Register(of.Name(), benchmark::kMicrosecond, repeats,
                        [&rows, of](benchmark::State& state) -> absl::Status {
                          PINION_ASSIGN_OR_RETURN(const HooksRow row, Measure(of, state));
                          rows.push_back(row);
                          return absl::OkStatus();
                        });
  }
  for (const int tensors : {kFewTensors, 1000, kManyTensors}) {
    if (quick && tensors != kFewTensors) continue;
    const int repeats = quick ? 3 : tensors == kManyTensors ? 5 : 11;
    const auto measure = [&recorded, tensors, repeats](benchmark::State& state) -> absl::Status {
      for ([[maybe_unused]] auto _ : state) {
        PINION_ASSIGN_OR_RETURN(
            const RecordedStepCost cost,
            MeasureRecordedStep({.tensors = tensors, .tensor_bytes = kMiB}, repeats));
        state.SetIterationTime(cost.recorded_us * 1e-6);
        state.counters["ratio"] = cost.ratio();
        recorded.push_back(cost);
      }
      return absl::OkStatus();
    };
    benchmarks.Register(absl::StrCat("recorded/", tensors, "x1.00MiB/1_thread"),
                        benchmark::kMicrosecond, /*iterations=*/1, measure);
  }
  return benchmarks.Run([&] { report = HooksReport(rows, recorded); });
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  return pinion::BenchmarksMain(argc, argv, "hooks_bench", "what a saved tensor costs the host",
                                pinion::Run);
}
