// Pinion's allocator beside its peers, in one run.
//
//   allocator_bench --json=FILE [--traces=FOLDER] [--samples=N] [--benchmark_filter=REGEX]
//
// Rows are benchmarks of Google Benchmark, whose time is the median nanoseconds of an allocate and
// a free together; the goals at the end are judged from them. Machines are noisy: compare within a
// run, and repeat it.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/allocator/allocation_trace.h"
#include "pinion/bench/allocator/allocator_cases.h"
#include "pinion/bench/allocator/peers.h"
#include "pinion/bench/goals.h"
#include "pinion/programs/output_file.h"
#include "pinion/programs/shared_data.h"
#include "pinion/programs/working_directory.h"

ABSL_FLAG(std::string, json, "", "writes rows and goals to this file");
ABSL_FLAG(std::string, traces, "", "folder of the recorded traces; default: the repository's");
ABSL_FLAG(int, samples, 31, "samples that a median is taken of");

namespace pinion {
namespace {

constexpr uint64_t kHoles[] = {4096, 16384, 65536};

// Results by the name of the case and of the peer, as the goals need them.
using Results = std::map<std::string, std::map<std::string, CaseResult>>;

class Run {
 public:
  explicit Run(std::vector<AllocationTrace> traces) : traces_(std::move(traces)) {}

  template <typename Peer>
  void Register() {
    for (const AllocationTrace& trace : traces_) {
      for (const int threads : {1, 2}) {
        Add<Peer>(absl::StrCat("trace:", trace.name, "/threads:", threads), [&trace, threads] {
          return MixedTrace<Peer>(trace, threads, absl::GetFlag(FLAGS_samples));
        });
      }
      Add<Peer>(absl::StrCat("producer_consumer:", trace.name),
                [&trace] { return ProducerConsumer<Peer>(trace, absl::GetFlag(FLAGS_samples)); });
    }
    for (const uint64_t holes : kHoles) {
      Add<Peer>(absl::StrCat("holes:", holes),
                [holes] { return AmongHoles<Peer>(holes, absl::GetFlag(FLAGS_samples)); });
    }
  }

  // Not timed: how much memory a trace costs.
  template <typename Peer>
  void MeasureWaste() {
    const double worst = WorstRoundingPercent<Peer>();
    for (const AllocationTrace& trace : traces_) {
      const WasteResult waste = Waste<Peer>(trace);
      std::cout << absl::StreamFormat("%-14s %-14s %9.1f %% %9.1f %% %12s\n", Peer::kName,
                                      trace.name, worst, waste.mean_percent,
                                      waste.locked_per_peak == 0
                                          ? std::string("-")
                                          : absl::StrFormat("%.2f", waste.locked_per_peak));
      report_.AddRow({{"case", absl::StrCat("waste:", trace.name)},
                      {"peer", Peer::kName},
                      {"worst_rounding_percent", worst},
                      {"mean_rounding_percent", waste.mean_percent},
                      {"locked_per_peak_live", waste.locked_per_peak}});
      if (std::string(Peer::kName) != PinionPeer::kName) continue;
      worst_rounding_ = worst;
      mean_rounding_ = std::max(mean_rounding_.value_or(0), waste.mean_percent);
    }
  }

  BenchReport Judge() {
    const auto pinion = [&](const std::string& name) { return Find(name, PinionPeer::kName); };
    std::optional<double> trace_ns, ratio, p99_ns, flat;
    for (const AllocationTrace& trace : traces_) {
      if (const auto result = pinion(absl::StrCat("trace:", trace.name, "/threads:1"))) {
        trace_ns = std::max(trace_ns.value_or(0), result->median_ns);
      }
      const std::string name = absl::StrCat("producer_consumer:", trace.name);
      const auto mine = pinion(name);
      const auto theirs = Find(name, PyTorchPeer::kName);
      if (mine && theirs) {
        ratio = std::min(ratio.value_or(1e9), theirs->median_ns / mine->median_ns);
        p99_ns = std::max(p99_ns.value_or(0), mine->p99_ns);
      }
    }
    const auto few = pinion(absl::StrCat("holes:", kHoles[0]));
    const auto many = pinion(absl::StrCat("holes:", kHoles[std::size(kHoles) - 1]));
    if (few && many) flat = many->median_ns / few->median_ns;
    report_.AddGoal("allocate+free of the traces, one thread, median ns (slowest trace)",
                    AtMost(100), trace_ns);
    report_.AddGoal("producer/consumer with tickets over PyTorch with record_event (least)",
                    AtLeast(3), ratio);
    report_.AddGoal("producer/consumer with tickets, p99 ns of a call", AtMost(1000), p99_ns);
    report_.AddGoal("64 Ki free holes over 4 Ki", AtMost(1.5), flat);
    report_.AddGoal("worst rounding from 4 KiB on, percent", AtMost(12.5), worst_rounding_);
    report_.AddGoal("mean rounding of the traces, percent (worst trace)", AtMost(5),
                    mean_rounding_);
    return report_;
  }

 private:
  template <typename Peer>
  void Add(const std::string& name, std::function<CaseResult()> measure) {
    benchmark::RegisterBenchmark(
        absl::StrCat(name, "/", Peer::kName).c_str(),
        [this, name, measure = std::move(measure)](benchmark::State& state) {
          CaseResult result;
          for (auto _ : state) {
            result = measure();
            state.SetIterationTime(result.median_ns * 1e-9);
          }
          state.counters["p99_ns"] = result.p99_ns;
          results_[name][Peer::kName] = result;
          report_.AddRow({{"case", name},
                          {"peer", Peer::kName},
                          {"median_ns", result.median_ns},
                          {"p99_ns", result.p99_ns}});
        })
        ->UseManualTime()
        ->Iterations(1)
        ->Unit(benchmark::kNanosecond);
  }

  std::optional<CaseResult> Find(const std::string& name, const std::string& peer) const {
    const auto found = results_.find(name);
    if (found == results_.end() || !found->second.contains(peer)) return std::nullopt;
    return found->second.at(peer);
  }

  const std::vector<AllocationTrace> traces_;
  Results results_;
  BenchReport report_;
  std::optional<double> worst_rounding_;
  std::optional<double> mean_rounding_;
};

// --traces, else what travels with the program, else the repository's.
std::filesystem::path TraceFolder() {
  if (const std::string given = absl::GetFlag(FLAGS_traces); !given.empty()) return given;
  if (const std::string shared = SharedDataPath("allocation_traces"); !shared.empty())
    return shared;
  const char* const repository = std::getenv("BUILD_WORKSPACE_DIRECTORY");  // by bazel run
  return std::filesystem::path(repository == nullptr ? "." : repository) / "bench/allocator/traces";
}

// Every trace of the folder, by name.
absl::StatusOr<std::vector<AllocationTrace>> ReadTraces() {
  const std::filesystem::path folder = TraceFolder();
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    paths.push_back(entry.path().string());
  }
  if (paths.empty()) {
    return absl::NotFoundError(
        absl::StrCat("no traces in ", folder.string(), ": give --traces=FOLDER"));
  }
  std::sort(paths.begin(), paths.end());
  std::vector<AllocationTrace> traces;
  for (const std::string& path : paths) {
    PINION_ASSIGN_OR_RETURN(AllocationTrace trace, ReadAllocationTrace(path));
    traces.push_back(std::move(trace));
  }
  return traces;
}

template <typename... Peers>
absl::Status RunAll(const std::vector<char*>& arguments) {
  if (arguments.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", arguments[1], "\" is not a flag; see --help"));
  }
  const std::string json = absl::GetFlag(FLAGS_json);
  if (!json.empty()) PINION_RETURN_IF_ERROR(CheckWritable(json));
  PINION_ASSIGN_OR_RETURN(std::vector<AllocationTrace> traces, ReadTraces());
  Run run(std::move(traces));
  (run.Register<Peers>(), ...);
  if (benchmark::RunSpecifiedBenchmarks() == 0) {
    return absl::InvalidArgumentError("--benchmark_filter leaves no case");
  }
  std::cout << absl::StreamFormat("\n%-14s %-14s %11s %11s %12s\n", "peer", "trace", "worst round",
                                  "mean round", "locked/peak");
  (run.MeasureWaste<Peers>(), ...);
  std::cout << "\n";
  return run.Judge().Finish(json);
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Compares Pinion's allocator with its peers.");
  benchmark::Initialize(&argc, argv);
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  using namespace pinion;
  absl::Status status = EnterWorkingDirectory();
  if (status.ok()) {
    status =
        RunAll<PinionPeer, PyTorchPeer, RmmPeer, BestFitPeer, MimallocPeer, MallocPeer>(arguments);
  }
  return ExitCode("allocator_bench", status);
}
