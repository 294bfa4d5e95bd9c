// What a saved tensor costs the host: pack, unpack and release, on a device that does nothing.
//
//   hooks_bench                         everything, wall time
//   hooks_bench --quick                 fewer tensors and repeats
//   hooks_bench --json=FILE             rows, and the goals that they are judged by
//   hooks_bench --benchmark_filter=1MiB
//
// docs/hooks_bench.md says how to read it.

#include <benchmark/benchmark.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/ram/ram_probe.h"
#include "pinion/bench/checked_benchmarks.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/null_device.h"
#include "pinion/bench/null_torch_device.h"
#include "pinion/bench/saving_step.h"
#include "pinion/bench/statistics.h"
#include "pinion/device/device.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/programs/output_file.h"
#include "pinion/programs/working_directory.h"

ABSL_FLAG(std::string, json, "", "file to write rows and goals to");
ABSL_FLAG(bool, quick, false, "fewer tensors and repeats");

namespace pinion {
namespace {

constexpr int kFew = 100;
constexpr int kMany = 5000;
constexpr uint64_t kSmallBytes = 4 * kKiB;

struct HooksCase {
  SavingStep step;
  bool leaves = false;  // all but what the window holds; else nothing does
  int threads = 1;

  std::string Name() const {
    return absl::StrCat(leaves ? "leaves" : "fits", "/", step.tensors, "x",
                        absl::StrReplaceAll(HumanBytes(step.tensor_bytes), {{" ", ""}}), "/",
                        threads, threads == 1 ? "_thread" : "_threads");
  }
};

std::vector<HooksCase> Cases(bool quick) {
  std::vector<HooksCase> cases;
  for (const bool leaves : {false, true}) {
    for (const uint64_t tensor_bytes : {kSmallBytes, kMiB, 64 * kMiB}) {
      for (const int tensors : {kFew, 1000, kMany}) {
        if (quick && tensors == kMany) continue;
        for (const int threads : {1, 2}) {
          cases.push_back({{tensors, tensor_bytes}, leaves, threads});
        }
      }
    }
  }
  return cases;
}

struct HooksRow {
  HooksCase of;
  // Wall time of a step per tensor.
  double none_us = 0;
  double nothing_us = 0;  // hooks that do nothing, less none_us
  double pinion_us = 0;   // less none_us
  double device_calls = 0;
  double capture_queries = 0;       // on the default stream, as all times are
  double capture_queries_side = 0;  // on another one
};

absl::StatusOr<std::shared_ptr<OffloadSession>> NewSession(bool leaves,
                                                           std::shared_ptr<Device> device) {
  OffloadOptions options;
  options.link = AssumedLink();
  // More than all of it, and not the value that stands for a choice of the session's.
  if (!leaves) options.eviction_window_bytes = OffloadOptions::kAutoWindow / 2;
  PINION_ASSIGN_OR_RETURN(
      std::shared_ptr<PinnedAllocator> allocator,
      PinnedAllocator::Create({}, device->pinned_source(), RamProbe("/none", "/none")));
  const DeviceBackend backend = {kNullTorchDevice, [device](int) { return device; }, device.get()};
  return OffloadSession::Create(options, backend, std::move(allocator));
}

// A step on each thread, at once; adds their times.
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

// The lower quartile: what else runs on the machine only adds to a time, and differences of a few
// hundred nanoseconds are wanted.
double PerTensor(const HooksCase& of, std::vector<double> times_us) {
  std::sort(times_us.begin(), times_us.end());
  return Quantile(times_us, 0.25) / of.step.tensors;
}

// What is measured is what the case's name says.
absl::Status CheckStats(const HooksCase& of, const OffloadStats& stats) {
  const double bytes = static_cast<double>(stats.offloaded_bytes);
  const double evicted = static_cast<double>(stats.evicted_bytes) / bytes;
  const bool as_named =
      of.leaves ? evicted > 0.8 && stats.fetched_bytes > 0.8 * bytes : stats.evicted_bytes == 0;
  if (stats.offloaded > 0 && stats.kept() == 0 && stats.offloaded == stats.unpacked && as_named)
    return absl::OkStatus();
  return absl::InternalError(absl::StrCat("not what the case says: ", stats.ToString()));
}

class HooksBench {
 public:
  void Register(const HooksCase& of, int repeats);
  BenchReport Report() const;
  CheckedBenchmarks& benchmarks() { return benchmarks_; }

 private:
  absl::Status Measure(const HooksCase& of, benchmark::State& state);
  absl::Status Count(HooksRow& row);

  std::vector<HooksRow> rows_;
  CheckedBenchmarks benchmarks_;
};

// What a step asks of the device, in a session of its own: counting costs time.
absl::StatusOr<CountingNullDevice::Calls> CallsOf(const HooksCase& of) {
  const auto device = std::make_shared<CountingNullDevice>();
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<OffloadSession> session,
                          NewSession(of.leaves, device));
  const auto scope = [&session] { return std::make_shared<OffloadScope>(session); };
  of.step.RunUs(scope);  // makes what is made once
  const CountingNullDevice::Calls before = device->calls();
  of.step.RunUs(scope);
  const CountingNullDevice::Calls after = device->calls();
  return CountingNullDevice::Calls{
      .events = after.events - before.events,
      .copies = after.copies - before.copies,
      .capture_queries = after.capture_queries - before.capture_queries};
}

absl::Status HooksBench::Count(HooksRow& row) {
  const double tensors = row.of.step.tensors;
  PINION_ASSIGN_OR_RETURN(const CountingNullDevice::Calls calls, CallsOf(row.of));
  row.device_calls = static_cast<double>(calls.events + calls.copies) / tensors;
  row.capture_queries = static_cast<double>(calls.capture_queries) / tensors;
  const c10::StreamGuard guard(NullSideStream());
  PINION_ASSIGN_OR_RETURN(const CountingNullDevice::Calls beside, CallsOf(row.of));
  row.capture_queries_side = static_cast<double>(beside.capture_queries) / tensors;
  return absl::OkStatus();
}

absl::Status HooksBench::Measure(const HooksCase& of, benchmark::State& state) {
  PINION_ASSIGN_OR_RETURN(
      const std::shared_ptr<OffloadSession> session,
      NewSession(of.leaves, std::make_shared<NullDevice>(NullDevice::Events::kDone)));
  const auto none = []() -> std::shared_ptr<void> { return nullptr; };
  const auto pinion = [&session] { return std::make_shared<OffloadScope>(session); };
  std::vector<double> warm_up;
  for (int i = 0; i < 2; ++i) RunSteps(of, pinion, warm_up);
  std::vector<double> none_us, nothing_us, pinion_us;
  // In turn, so that whatever slows the machine down slows all of them.
  for ([[maybe_unused]] auto _ : state) {
    RunSteps(of, none, none_us);
    RunSteps(of, HooksThatDoNothing, nothing_us);
    RunSteps(of, pinion, pinion_us);
    state.SetIterationTime(pinion_us.back() * 1e-6);
  }
  PINION_RETURN_IF_ERROR(CheckStats(of, session->GetStats()));
  HooksRow row = {.of = of, .none_us = PerTensor(of, std::move(none_us))};
  row.nothing_us = PerTensor(of, std::move(nothing_us)) - row.none_us;
  row.pinion_us = PerTensor(of, std::move(pinion_us)) - row.none_us;
  PINION_RETURN_IF_ERROR(Count(row));
  state.counters["none_us"] = row.none_us;
  state.counters["nothing_us"] = row.nothing_us;
  state.counters["pinion_us"] = row.pinion_us;
  state.counters["calls"] = row.device_calls;
  state.counters["captures"] = row.capture_queries;
  state.counters["captures_side"] = row.capture_queries_side;
  rows_.push_back(row);
  return absl::OkStatus();
}

void HooksBench::Register(const HooksCase& of, int repeats) {
  benchmarks_
      .Register(of.Name(), [this, of](benchmark::State& state) { return Measure(of, state); })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(repeats);
}

template <typename Value>
std::optional<double> Worst(const std::vector<HooksRow>& rows, Value value) {
  std::optional<double> worst;
  for (const HooksRow& row : rows) {
    const std::optional<double> found = value(row);
    if (found.has_value()) worst = std::max(worst.value_or(*found), *found);
  }
  return worst;
}

BenchReport HooksBench::Report() const {
  BenchReport report;
  // Of all rows: a tenth of a microsecond is lost in the noise of a row whose steps do not fit into
  // the processor's caches, and hooks that do nothing do the same everywhere.
  std::vector<double> all_nothing_us;
  for (const HooksRow& row : rows_) all_nothing_us.push_back(row.nothing_us);
  const double nothing_us = rows_.empty() ? 0 : Summarize(std::move(all_nothing_us)).median;
  // Nothing is known where noise has eaten what is divided by.
  const auto over = [](double us, double baseline_us) -> std::optional<double> {
    if (baseline_us <= 0) return std::nullopt;
    return us / baseline_us;
  };
  const auto ratio = [&](const HooksRow& row) { return over(row.pinion_us, nothing_us); };
  for (const HooksRow& row : rows_) {
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
                   {"capture_queries", row.capture_queries},
                   {"capture_queries_side", row.capture_queries_side}});
  }
  const auto of_size = [this](bool small, double HooksRow::*field) {
    return Worst(rows_, [=](const HooksRow& row) -> std::optional<double> {
      if ((row.of.step.tensor_bytes == kSmallBytes) != small) return std::nullopt;
      return row.*field;
    });
  };
  report.AddGoal("a saved tensor: Pinion's hooks over hooks that do nothing", AtMost(10),
                 Worst(rows_, ratio));
  report.AddGoal(absl::StrCat("a saved tensor of ", kMany, " over one of ", kFew), AtMost(1.2),
                 Worst(rows_, [&](const HooksRow& many) -> std::optional<double> {
                   if (many.of.step.tensors != kMany) return std::nullopt;
                   HooksCase few = many.of;
                   few.step.tensors = kFew;
                   for (const HooksRow& row : rows_) {
                     if (row.of.Name() == few.Name()) return over(many.pinion_us, row.pinion_us);
                   }
                   return std::nullopt;
                 }));
  report.AddGoal("events, waits and copies of a large tensor", AtMost(10),
                 of_size(/*small=*/false, &HooksRow::device_calls));
  report.AddGoal("capture queries of a large tensor, on the default stream", AtMost(1),
                 of_size(/*small=*/false, &HooksRow::capture_queries));
  report.AddGoal("events, waits and copies of a small tensor", AtMost(2),
                 of_size(/*small=*/true, &HooksRow::device_calls));
  report.AddGoal("capture queries of a small tensor, on the default stream", AtMost(0.2),
                 of_size(/*small=*/true, &HooksRow::capture_queries));
  return report;
}

absl::Status Run(const std::vector<char*>& arguments) {
  if (arguments.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", arguments[1], "\" is not a flag; see --help"));
  }
  const std::string json = absl::GetFlag(FLAGS_json);
  if (!json.empty()) PINION_RETURN_IF_ERROR(CheckWritable(json));
  const bool quick = absl::GetFlag(FLAGS_quick);
  RegisterNullTorchDevice();
  HooksBench bench;
  for (const HooksCase& of : Cases(quick)) {
    bench.Register(of, quick ? 5 : of.step.tensors == kFew ? 101 : 21);
  }
  PINION_RETURN_IF_ERROR(bench.benchmarks().Run());
  std::printf("\n");
  const absl::Status finished = bench.Report().Finish(json);
  PINION_RETURN_IF_ERROR(bench.benchmarks().failures());
  return finished;
}

void PrintHelp() {
  std::printf(
      "hooks_bench: what a saved tensor costs the host, on a device that does nothing\n"
      "  --json=FILE             writes rows and goals\n"
      "  --quick                 fewer tensors and repeats\n"
      "  --benchmark_filter=REGEX and Google Benchmark's other flags\n");
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv, pinion::PrintHelp);
  absl::SetProgramUsageMessage("what a saved tensor costs the host; see --help");
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  absl::Status status = pinion::EnterWorkingDirectory();
  if (status.ok()) status = pinion::Run(arguments);
  return pinion::ExitCode("hooks_bench", status);
}
