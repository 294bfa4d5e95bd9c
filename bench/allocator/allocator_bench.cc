// Compares Pinion's allocator with its peers, in one process.
//
//   allocator_bench --json=FILE [--traces=FOLDER] [--runs=N] [--samples=N]
//                   [--benchmark_filter=REGEX]
//
// Rows are benchmarks of Google Benchmark. Their time is the median nanoseconds of an allocation
// and its free. Goals are ratios to peers measured in the same run, judged by the median of the
// runs.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/allocator/allocation_trace.h"
#include "pinion/bench/allocator/allocator_cases.h"
#include "pinion/bench/allocator/peers.h"
#include "pinion/bench/bench_main.h"
#include "pinion/bench/goals.h"
#include "pinion/programs/shared_data.h"

ABSL_FLAG(std::string, traces, "", "folder of the recorded traces; default: the repository's");
ABSL_FLAG(int, runs, 5, "how often each case is measured");
ABSL_FLAG(int, samples, 31, "samples that a median is taken of");

namespace pinion {
namespace {

constexpr uint64_t kHoles[] = {4096, 16384, 65536};
constexpr int kManyThreads[] = {2, 4, 8};
constexpr int kMostThreads = 8;
constexpr int kRotatingThreads = 4;
constexpr int kBlocksOfRecords = 4096;
constexpr int kHeldByOther[] = {kHeldPieces, 100'000};

// Peak locked bytes over peak live bytes of each trace with one heap for all threads.
constexpr std::pair<const char*, double> kLockedByOneHeap[] = {
    {"convnet", 1.22}, {"gpt2_small", 1.12}, {"lstm_512", 1.59}};

// One result per run, by case and peer: the input of the goals.
using Results = std::map<std::string, std::map<std::string, std::vector<CaseResult>>>;

using Quantity = double CaseResult::*;

class Run {
 public:
  Run(std::vector<AllocationTrace> traces, BenchReport& report)
      : traces_(std::move(traces)), report_(report) {}

  CheckedBenchmarks& benchmarks() { return benchmarks_; }

  // Measures the peers of a case side by side. Cases of one thread come first: glibc's mutexes,
  // which PyTorch and RMM take, cost half until the process starts a thread.
  template <typename... Peers>
  void Register() {
    const int runs = absl::GetFlag(FLAGS_runs);
    AddMixed<Peers...>(/*threads=*/1);
    for (const AllocationTrace& trace : traces_) {
      AddRuns<PinionInLibTorchPeer, LibTorchCachePeer>(
          LibTorchName(trace), [&trace]<typename Peer>(int samples) {
            return MixedTrace<Peer>(trace, /*threads=*/1, samples);
          });
    }
    AddRuns<PinionInLibTorchPeer, LibTorchCachePeer>(
        kRecordPageable, []<typename Peer>(int samples) {
          return RecordEventOfPageable<Peer>(kBlocksOfRecords, samples);
        });
    for (int run = 0; run < runs; ++run) {
      for (const uint64_t holes : kHoles) {
        const auto among = [holes]<typename Peer>(int samples) {
          return AmongHoles<Peer>(holes, samples);
        };
        // Peers run once: no goal compares them.
        (AddIf<Peers>(run == 0 || std::is_same_v<Peers, PinionPeer>, HolesName(holes), run, among),
         ...);
      }
    }
    for (const int threads : kManyThreads) AddMixed<Peers...>(threads);
    for (const AllocationTrace& trace : traces_) {
      AddRuns<Peers...>(ProducerName(trace), [&trace]<typename Peer>(int samples) {
        return ProducerConsumer<Peer>(trace, samples);
      });
    }
    for (const AllocationTrace& trace : traces_) {
      AddRuns<Peers...>(absl::StrCat("rotating:", trace.name, "/threads:", kRotatingThreads),
                        [&trace]<typename Peer>(int samples) {
                          return RotatingThreads<Peer>(trace, kRotatingThreads, samples);
                        });
    }
    for (const AllocationTrace& trace : traces_) {
      for (const int held : kHeldByOther) {
        AddRuns<Peers...>(absl::StrCat("beside_held:", trace.name, "/held:", held),
                          [&trace, held]<typename Peer>(int samples) {
                            return BesideHeld<Peer>(InPieces(trace), held, samples);
                          });
      }
    }
  }

  // Measures, untimed, how much memory a trace takes.
  template <typename Peer>
  void MeasureWaste() {
    const double worst = WorstRoundingPercent<Peer>();
    for (const AllocationTrace& trace : traces_) {
      const WasteResult waste = Waste<Peer>(trace);
      report_.AddRow({{"case", absl::StrCat("waste:", trace.name)},
                      {"peer", Peer::kName},
                      {"worst_rounding_percent", worst},
                      {"mean_rounding_percent", waste.mean_percent},
                      {"locked_per_peak_live", waste.locked_per_peak}});
      if (std::string(Peer::kName) != PinionPeer::kName) continue;
      worst_rounding_ = worst;
      mean_rounding_ = std::max(mean_rounding_.value_or(0), waste.mean_percent);
      for (const auto& [name, by_one_heap] : kLockedByOneHeap) {
        if (trace.name != name) continue;
        locked_ = std::max(locked_.value_or(0), waste.locked_per_peak / by_one_heap);
      }
    }
  }

  void Judge() {
    // With one processor, p99 would measure the wait of a thread for that processor.
    const bool two_processors = OnProcessor::Count() >= 2;
    // On one processor threads also share its caches.
    const double wider = two_processors ? 1 : 1.2;
    const auto one = [](const AllocationTrace& trace) { return MixedName(trace, 1); };
    const auto two = [](const AllocationTrace& trace) { return MixedName(trace, 2); };
    const auto eight = [](const AllocationTrace& trace) { return MixedName(trace, kMostThreads); };
    constexpr Quantity kMedian = &CaseResult::median_ns;
    constexpr Quantity kP99 = &CaseResult::p99_ns;
    const auto over_pytorch = [&](const std::string& what, double limit, const auto& name) {
      report_.AddGoal(what, AtMost(wider * limit), Worst(name, PyTorchPeer::kName, kMedian));
    };
    over_pytorch("one thread over PyTorch's time (worst trace)", 0.6, one);
    report_.AddGoal("one thread over RMM's time (worst trace)", AtMost(wider * 0.8),
                    Worst(one, RmmPeer::kName, kMedian));
    report_.AddGoal(
        "through LibTorch over its own cache (worst trace)", AtMost(wider),
        Worst(LibTorchName, LibTorchCachePeer::kName, kMedian, PinionInLibTorchPeer::kName));
    report_.AddGoal("record_event of pageable memory, through LibTorch over its own cache",
                    AtMost(wider),
                    MedianRatio(Find(kRecordPageable, PinionInLibTorchPeer::kName),
                                Find(kRecordPageable, LibTorchCachePeer::kName), kMedian));
    over_pytorch("two threads over PyTorch's time (worst trace)", 0.6, two);
    over_pytorch("eight threads over PyTorch's time (worst trace)", 0.6, eight);
    if (two_processors) {
      report_.AddGoal("two threads, p99 over PyTorch's (worst trace)", AtMost(1),
                      Worst(two, PyTorchPeer::kName, kP99));
    }
    over_pytorch("producer/consumer with tickets over PyTorch's time with record_event (worst)",
                 1.0 / 3, ProducerName);
    if (two_processors) {
      report_.AddGoal("producer/consumer with tickets, p99 over PyTorch's (worst)", AtMost(0.5),
                      Worst(ProducerName, PyTorchPeer::kName, kP99));
    }
    report_.AddGoal("64 Ki free holes over 4 Ki", AtMost(wider * 1.5),
                    MedianRatio(Find(HolesName(kHoles[std::size(kHoles) - 1]), kPinion),
                                Find(HolesName(kHoles[0]), kPinion), kMedian));
    report_.AddGoal("worst rounding from 4 KiB on, percent", AtMost(12.5), worst_rounding_);
    report_.AddGoal("mean rounding of the traces, percent (worst trace)", AtMost(5),
                    mean_rounding_);
    report_.AddGoal(
        "locked over most live bytes, one thread, over what it was with one heap (worst)",
        AtMost(1.02), locked_);
  }

 private:
  static constexpr const char* kPinion = PinionPeer::kName;
  static constexpr const char* kRecordPageable = "record_event:pageable";

  static std::string MixedName(const AllocationTrace& trace, int threads) {
    return absl::StrCat("trace:", trace.name, "/threads:", threads);
  }
  static std::string ProducerName(const AllocationTrace& trace) {
    return absl::StrCat("producer_consumer:", trace.name);
  }

  static std::string HolesName(uint64_t holes) { return absl::StrCat("holes:", holes); }

  static std::string LibTorchName(const AllocationTrace& trace) {
    return absl::StrCat("through_libtorch:", trace.name);
  }

  template <typename... Peers>
  void AddMixed(int threads) {
    for (const AllocationTrace& trace : traces_) {
      AddRuns<Peers...>(MixedName(trace, threads), [&trace, threads]<typename Peer>(int samples) {
        return MixedTrace<Peer>(trace, threads, samples);
      });
    }
  }

  template <typename... Peers, typename Measure>
  void AddRuns(const std::string& name, const Measure& measure) {
    for (int run = 0; run < absl::GetFlag(FLAGS_runs); ++run) {
      (AddIf<Peers>(true, name, run, measure), ...);
    }
  }

  // `measure` is a template of the peer.
  template <typename Peer, typename Measure>
  void AddIf(bool runs, const std::string& name, int run, const Measure& measure) {
    if (!runs) return;
    const auto add = [=, this](benchmark::State& state) -> absl::Status {
      for ([[maybe_unused]] auto _ : state) {
        const absl::StatusOr<CaseResult> result =
            measure.template operator()<Peer>(absl::GetFlag(FLAGS_samples));
        PINION_RETURN_IF_ERROR(result.status());
        state.SetIterationTime(result->median_ns * 1e-9);
        state.counters["p99_ns"] = result->p99_ns;
        results_[name][Peer::kName].push_back(*result);
        report_.AddRow({{"case", name},
                        {"run", run},
                        {"peer", Peer::kName},
                        {"median_ns", result->median_ns},
                        {"p99_ns", result->p99_ns}});
      }
      return absl::OkStatus();
    };
    benchmarks_.Register(absl::StrCat(name, "/run:", run, "/", Peer::kName), benchmark::kNanosecond,
                         /*iterations=*/1, add);
  }

  // Returns no results if the filter excludes the case.
  const std::vector<CaseResult>& Find(const std::string& name, const std::string& peer) {
    return results_[name][peer];
  }

  // Returns the `quantity` of `of` over the peer's: the median of the runs, the maximum of the
  // traces.
  template <typename Name>
  std::optional<double> Worst(const Name& name, const std::string& peer, Quantity quantity,
                              const std::string& of = kPinion) {
    return pinion::Worst(AtMost(1), traces_, [&](const AllocationTrace& trace) {
      return MedianRatio(Find(name(trace), of), Find(name(trace), peer), quantity);
    });
  }

  // Takes the ratio run by run.
  static std::optional<double> MedianRatio(const std::vector<CaseResult>& mine,
                                           const std::vector<CaseResult>& theirs,
                                           Quantity quantity) {
    if (mine.empty() || mine.size() != theirs.size()) return std::nullopt;
    std::vector<double> ratios;
    for (size_t run = 0; run < mine.size(); ++run) {
      ratios.push_back(mine[run].*quantity / theirs[run].*quantity);
    }
    return Summarize(ratios).median;
  }

  const std::vector<AllocationTrace> traces_;
  BenchReport& report_;
  CheckedBenchmarks benchmarks_;
  Results results_;
  std::optional<double> worst_rounding_;
  std::optional<double> mean_rounding_;
  std::optional<double> locked_;  // over locked bytes with one heap
};

// Returns --traces, else the folder beside the program, else the repository's.
std::filesystem::path TraceFolder() {
  if (const std::string given = absl::GetFlag(FLAGS_traces); !given.empty()) return given;
  if (const std::string shared = SharedDataPath("allocation_traces"); !shared.empty())
    return shared;
  const char* const repository = std::getenv("BUILD_WORKSPACE_DIRECTORY");  // by bazel run
  return std::filesystem::path(repository == nullptr ? "." : repository) / "bench/allocator/traces";
}

// Returns every trace of the folder, sorted by name.
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
absl::Status RunAll(BenchReport& report) {
  PINION_ASSIGN_OR_RETURN(std::vector<AllocationTrace> traces, ReadTraces());
  Run run(std::move(traces), report);
  run.Register<Peers...>();
  (run.MeasureWaste<Peers>(), ...);
  report.PrintRows();  // Google Benchmark prints the others
  return run.benchmarks().Run([&] { run.Judge(); });
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  using namespace pinion;
  return BenchmarksMain(argc, argv, "allocator_bench", "Pinion's allocator and its peers",
                        RunAll<PinionPeer, PyTorchPeer, RmmPeer>);
}
