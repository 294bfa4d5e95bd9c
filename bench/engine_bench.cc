// Compares copies through the engine with copies by the device's calls.
//
//   engine_bench                        everything; cuda:0 with a driver, else emu:0 (modelled)
//   engine_bench --quick                fewer sizes
//   engine_bench --json=FILE            rows, and the goals that they are judged by
//   engine_bench --benchmark_filter=pieces/D2H
//
// docs/results/benchmarks.md says how to read it.

#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/checked_benchmarks.h"
#include "pinion/bench/compute_load.h"
#include "pinion/bench/copy_method.h"
#include "pinion/bench/copy_world.h"
#include "pinion/bench/engine_cases.h"
#include "pinion/bench/engine_goals.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/packed_copy.h"
#include "pinion/bench/statistics.h"
#include "pinion/bench/submit_cost.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/command_line.h"
#include "pinion/programs/output_file.h"
#include "pinion/programs/run_options.h"
#include "pinion/programs/working_directory.h"

ABSL_FLAG(std::string, device, "", "cuda:N or emu:0; default: cuda:0 with a driver, else emu:0");
ABSL_FLAG(std::string, preset, "h100_pcie5",
          "of the emulated device: a100_pcie4, h100_pcie5, b200_pcie5, gh200_c2c or gb200_c2c");
ABSL_FLAG(std::string, json, "", "file to write rows and goals to");
ABSL_FLAG(bool, quick, false, "fewer sizes");

namespace pinion {
namespace {

// Virtual times repeat exactly.
constexpr int kModelledRuns = 1;
constexpr int kMeasuredRuns = 10;
constexpr int kSubmitRuns = 51;

// Matrix widths: a GPU should compute longer than a launch takes.
constexpr int64_t kEmulatedWidth = 256;
constexpr int64_t kGpuWidth = 2048;

void PrintHelp() {
  std::printf(
      "engine_bench: what copies cost through the engine, against what the device can do\n"
      "  --device=cuda:N|emu:0   default: cuda:0 with a driver, else emu:0\n"
      "  --preset=NAME           of the emulated device: %s; default: h100_pcie5\n"
      "  --json=FILE             writes rows and goals\n"
      "  --quick                 fewer sizes\n"
      "  --benchmark_filter=REGEX and Google Benchmark's other flags\n",
      absl::StrJoin(PresetNames(), ", ").c_str());
}

BenchTime Median(const std::vector<BenchTime>& times) {
  const auto median = [&times](double BenchTime::*field) {
    std::vector<double> values;
    for (const BenchTime& time : times) values.push_back(time.*field);
    return Summarize(std::move(values)).median;
  };
  return {.ms = median(&BenchTime::ms),
          .host_ms = median(&BenchTime::host_ms),
          .compute_ms = median(&BenchTime::compute_ms),
          .compute_alone_ms = median(&BenchTime::compute_alone_ms)};
}

class EngineBench {
 public:
  static absl::StatusOr<std::unique_ptr<EngineBench>> Create(const RunOptions& options);

  std::string Header() const;
  void Register(const BenchCase& of);
  BenchReport Report() const;
  // Fail if a case cannot be measured or leaves wrong bytes.
  CheckedBenchmarks& benchmarks() { return benchmarks_; }

 private:
  explicit EngineBench(Accelerator accelerator) : accelerator_(std::move(accelerator)) {}

  struct Measured {
    std::function<absl::StatusOr<BenchTime>()> run;
    std::function<absl::Status()> verify;
  };
  absl::StatusOr<Measured> Prepare(const BenchCase& of);
  absl::Status Measure(const BenchCase& of, benchmark::State& state);
  bool Modelled(const BenchCase& of) const;

  Accelerator accelerator_;
  std::string name_;
  DeviceInfo info_;
  std::unique_ptr<CopyWorld> world_;
  std::unique_ptr<ComputeLoad> load_;
  LinkCalibration link_;
  std::vector<BenchRow> rows_;
  CheckedBenchmarks benchmarks_;
};

absl::StatusOr<std::unique_ptr<EngineBench>> EngineBench::Create(const RunOptions& options) {
  PINION_ASSIGN_OR_RETURN(Accelerator accelerator, Accelerator::Open(options));
  std::unique_ptr<EngineBench> bench(new EngineBench(std::move(accelerator)));
  Accelerator& opened = bench->accelerator_;
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<Device> device,
                          opened.backend().device(opened.device().index()));
  bench->name_ = device->name();
  bench->info_ = device->info();
  // The emulated device computes on the CPU, in kernels too small for several threads.
  if (opened.machine() != nullptr) at::set_num_threads(1);
  const StreamHandle compute = NativeStream(CurrentStream(opened.device()));
  PINION_ASSIGN_OR_RETURN(
      bench->world_, CopyWorld::Create(device, compute, [&opened] { return opened.now_ms(); }));
  CopyWorld& world = *bench->world_;
  PINION_ASSIGN_OR_RETURN(bench->link_, world.engine().Calibrate(world.allocator()));
  PINION_ASSIGN_OR_RETURN(
      bench->load_, ComputeLoad::Create(world, opened.device(),
                                        opened.machine() == nullptr ? kGpuWidth : kEmulatedWidth));
  // Creates events and the driver's state.
  const BenchCase warm_up = {
      .flow = BenchFlow::kDuplex, .method = BenchMethod::kEngine, .piece_bytes = 4096};
  PINION_ASSIGN_OR_RETURN(std::vector<CopyLane> lanes, NewLanes(world, warm_up));
  PINION_ASSIGN_OR_RETURN(std::unique_ptr<CopyMethod> method,
                          NewEngineCopies(world, std::move(lanes)));
  PINION_RETURN_IF_ERROR(TimeCopies(world, *method, /*transfers=*/32).status());
  return bench;
}

std::string EngineBench::Header() const {
  // A modelled device's model names its link.
  const bool names_link = info_.modelled || info_.link_name.empty();
  return absl::StrCat(name_, ", ", info_.model, names_link ? "" : " on ",
                      names_link ? "" : info_.link_name, "\n", link_.ToString());
}

bool EngineBench::Modelled(const BenchCase& of) const {
  return info_.modelled && of.section != BenchSection::kSubmit;
}

absl::StatusOr<EngineBench::Measured> EngineBench::Prepare(const BenchCase& of) {
  if (of.section == BenchSection::kSubmit) {
    PINION_ASSIGN_OR_RETURN(std::shared_ptr<SubmitCost> cost, SubmitCost::Create(of));
    return Measured{[cost] { return cost->Run(); }, [] { return absl::OkStatus(); }};
  }
  std::shared_ptr<CopyMethod> method;
  if (of.method == BenchMethod::kPacked) {
    PINION_ASSIGN_OR_RETURN(method, NewPackedCopies(*world_, accelerator_.device(), of));
  } else {
    PINION_ASSIGN_OR_RETURN(std::vector<CopyLane> lanes, NewLanes(*world_, of));
    PINION_ASSIGN_OR_RETURN(method, of.method == BenchMethod::kRaw
                                        ? NewRawCopies(*world_, std::move(lanes))
                                        : NewEngineCopies(*world_, std::move(lanes)));
  }
  Measured measured;
  measured.verify = [method] { return method->Verify(); };
  if (of.section == BenchSection::kCompute && of.setting != BenchSetting::kIdle) {
    const int64_t products = load_->ProductsFor(link_.d2h.CopyUs(of.piece_bytes) * 1e-3);
    measured.run = [this, method, of, products] {
      return load_->TimeCopies(*method, of, products);
    };
  } else {
    measured.run = [this, method, of] { return TimeCopies(*world_, *method, of.transfers); };
  }
  return measured;
}

absl::Status EngineBench::Measure(const BenchCase& of, benchmark::State& state) {
  PINION_ASSIGN_OR_RETURN(const Measured measured, Prepare(of));
  if (!Modelled(of)) PINION_RETURN_IF_ERROR(measured.run().status());  // warms up
  std::vector<BenchTime> times;
  for ([[maybe_unused]] auto _ : state) {
    PINION_ASSIGN_OR_RETURN(const BenchTime time, measured.run());
    state.SetIterationTime(time.ms * 1e-3);
    times.push_back(time);
  }
  PINION_RETURN_IF_ERROR(measured.verify());
  const BenchRow row = {of, Median(times)};
  rows_.push_back(row);

  state.SetLabel(Modelled(of) ? "modelled" : "wall time");
  if (of.section == BenchSection::kSubmit) {
    state.counters["median_ns"] = row.time.ms * 1e6;
    return absl::OkStatus();
  }
  state.counters["GB/s"] = GbPerS(row);
  state.counters["host_us"] = row.time.host_ms * 1e3;
  if (row.time.compute_alone_ms > 0) {
    state.counters["slowdown"] = row.time.compute_ms / row.time.compute_alone_ms;
  }
  return absl::OkStatus();
}

void EngineBench::Register(const BenchCase& of) {
  auto* const registered = benchmarks_.Register(
      CaseName(of), [this, of](benchmark::State& state) { return Measure(of, state); });
  registered->UseManualTime();
  if (of.section == BenchSection::kSubmit) {
    registered->Unit(benchmark::kNanosecond)->Iterations(kSubmitRuns);
  } else {
    registered->Unit(benchmark::kMicrosecond)
        ->Iterations(info_.modelled ? kModelledRuns : kMeasuredRuns);
  }
}

BenchReport EngineBench::Report() const {
  BenchReport report;
  for (const BenchRow& row : rows_) {
    nlohmann::ordered_json json = {{"case", CaseName(row.of)},
                                   {"section", SectionName(row.of.section)},
                                   {"flow", FlowName(row.of.flow)},
                                   {"method", MethodName(row.of)},
                                   {"setting", SettingName(row.of.setting)},
                                   {"transfers", row.of.transfers},
                                   {"pieces", row.of.pieces},
                                   {"piece_bytes", row.of.piece_bytes},
                                   {"modelled", Modelled(row.of)},
                                   {"ms", row.time.ms}};
    if (row.of.section != BenchSection::kSubmit) {
      json["device"] = name_;
      json["model"] = info_.model;
      json["host_ms"] = row.time.host_ms;
      json["gb_per_s"] = GbPerS(row);
    }
    if (row.time.compute_alone_ms > 0) {
      json["compute_ms"] = row.time.compute_ms;
      json["compute_alone_ms"] = row.time.compute_alone_ms;
    }
    report.AddRow(std::move(json));
  }
  for (Goal& goal : EngineGoals(rows_, {.d2h = link_.d2h, .h2d = link_.h2d})) {
    report.AddGoal(std::move(goal.name), goal.bound, goal.value);
  }
  return report;
}

absl::Status Run(const std::vector<char*>& arguments) {
  if (arguments.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", arguments[1], "\" is not a flag; see --help"));
  }
  const std::string json = absl::GetFlag(FLAGS_json);
  if (!json.empty()) PINION_RETURN_IF_ERROR(CheckWritable(json));
  RunOptions options;
  PINION_ASSIGN_OR_RETURN(options.device, ChooseDevice(absl::GetFlag(FLAGS_device)));
  PINION_ASSIGN_OR_RETURN(options.preset, FindPreset(absl::GetFlag(FLAGS_preset)));
  PINION_ASSIGN_OR_RETURN(const std::unique_ptr<EngineBench> bench, EngineBench::Create(options));
  absl::PrintF("%s\n", bench->Header());
  std::fflush(stdout);
  for (const BenchCase& of : EngineBenchCases(absl::GetFlag(FLAGS_quick))) bench->Register(of);
  PINION_RETURN_IF_ERROR(bench->benchmarks().Run());

  absl::PrintF("\n");
  const absl::Status finished = bench->Report().Finish(json);
  PINION_RETURN_IF_ERROR(bench->benchmarks().failures());
  return finished;
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv, pinion::PrintHelp);
  absl::SetProgramUsageMessage("what copies cost through the engine; see --help");
  const std::vector<char*> arguments = pinion::ParseFlags(argc, argv);
  absl::Status status = pinion::EnterWorkingDirectory();
  if (status.ok()) status = pinion::Run(arguments);
  return pinion::ExitCode("engine_bench", status);
}
