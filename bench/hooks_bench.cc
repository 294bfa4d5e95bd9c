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
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/ram/ram_probe.h"
#include "pinion/bench/checked_benchmarks.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/hooks_report.h"
#include "pinion/bench/null_device.h"
#include "pinion/bench/null_torch_device.h"
#include "pinion/bench/recorded_step.h"
#include "pinion/bench/saving_step.h"
#include "pinion/bench/statistics.h"
#include "pinion/device/device.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/programs/command_line.h"
#include "pinion/programs/output_file.h"
#include "pinion/programs/working_directory.h"

ABSL_FLAG(std::string, json, "", "file to write rows and goals to");
ABSL_FLAG(bool, quick, false, "fewer tensors and repeats");

namespace pinion {
namespace {

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

// The lower quartile: other programs only add time, and the results are hundreds of nanoseconds.
double PerTensor(const HooksCase& of, std::vector<double> times_us) {
  std::sort(times_us.begin(), times_us.end());
  return Quantile(times_us, 0.25) / of.step.tensors;
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

class HooksBench {
 public:
  void Register(const HooksCase& of, int repeats);
  // Registers recorded steps of `tensors` tensors of 1 MiB.
  void RegisterRecorded(int tensors, int repeats);
  BenchReport Report() const { return HooksReport(rows_, recorded_); }
  CheckedBenchmarks& benchmarks() { return benchmarks_; }

 private:
  absl::Status Measure(const HooksCase& of, benchmark::State& state);
  absl::Status Count(HooksRow& row);

  std::vector<HooksRow> rows_;
  std::vector<RecordedStepCost> recorded_;
  CheckedBenchmarks benchmarks_;
};

// Counts a step's calls of the device in a separate session, since counting takes time.
absl::StatusOr<CountingNullDevice::Calls> CallsOf(const HooksCase& of) {
  const auto device = std::make_shared<CountingNullDevice>();
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<OffloadSession> session,
                          NewSession(Windows(of.leaves), device));
  const auto scope = [&session] { return std::make_shared<OffloadScope>(session); };
  of.step.RunUs(scope);  // warms up
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

void HooksBench::RegisterRecorded(int tensors, int repeats) {
  const auto measure = [this, tensors, repeats](benchmark::State& state) -> absl::Status {
    const auto new_session = [](std::shared_ptr<Device> device, uint64_t target_bytes) {
      OffloadOptions options;
      options.memory_target_bytes = target_bytes;
      return NewSession(options, std::move(device));
    };
    for ([[maybe_unused]] auto _ : state) {
      PINION_ASSIGN_OR_RETURN(
          const RecordedStepCost cost,
          MeasureRecordedStep({.tensors = tensors, .tensor_bytes = kMiB}, new_session, repeats));
      state.SetIterationTime(cost.recorded_us * 1e-6);
      state.counters["ratio"] = cost.ratio();
      recorded_.push_back(cost);
    }
    return absl::OkStatus();
  };
  benchmarks_.Register(absl::StrCat("recorded/", tensors, "x1.00MiB/1_thread"), measure)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(1);
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
    bench.Register(of, quick ? 5 : of.step.tensors == kFewTensors ? 101 : 21);
  }
  for (const int tensors : {kFewTensors, 1000, kManyTensors}) {
    if (!quick || tensors == kFewTensors)
      bench.RegisterRecorded(tensors, quick ? 3 : tensors == kManyTensors ? 5 : 11);
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
  const std::vector<char*> arguments = pinion::ParseFlags(argc, argv);
  absl::Status status = pinion::EnterWorkingDirectory();
  if (status.ok()) status = pinion::Run(arguments);
  return pinion::ExitCode("hooks_bench", status);
}
