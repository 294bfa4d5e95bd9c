// Compares copies through the engine with copies by the device's calls.
//
//   engine_bench                        everything; cuda:0 with a driver, else emu:0 (modelled)
//   engine_bench --quick                fewer sizes
//   engine_bench --json=FILE            rows, and the goals that they are judged by
//   engine_bench --benchmark_filter=pieces/D2H
//
// docs/results/benchmarks.md says how to read it.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <benchmark/benchmark.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/bench_main.h"
#include "pinion/bench/copy_method.h"
#include "pinion/bench/engine_cases.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/null_device.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/run_options.h"

ABSL_FLAG(std::string, device, "", "cuda:N or emu:0; default: cuda:0 with a driver, else emu:0");
ABSL_FLAG(std::string, preset, "h100_pcie5",
          "of the emulated device: a100_pcie4, h100_pcie5, b200_pcie5, gh200_c2c or gb200_c2c");
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

// Computes beside copies: products of square float32 matrices, one after another. LibTorch's
// current stream must be the world's compute stream. Throws LibTorch's errors.
class ComputeLoad {
 public:
  // `width` is the matrices' size.
  static absl::StatusOr<std::unique_ptr<ComputeLoad>> Create(CopyWorld& world, c10::Device device,
                                                             int64_t width) {
    constexpr int64_t kWarmUpProducts = 16;
    const auto options = at::device(device).dtype(at::kFloat);
    std::unique_ptr<ComputeLoad> load(new ComputeLoad(world, at::rand({width, width}, options)));
    PINION_ASSIGN_OR_RETURN(load->start_, world.device().CreateTimedEvent());
    PINION_ASSIGN_OR_RETURN(load->end_, world.device().CreateTimedEvent());
    PINION_RETURN_IF_ERROR(load->TimeAlone(kWarmUpProducts).status());
    PINION_ASSIGN_OR_RETURN(const double ms, load->TimeAlone(kWarmUpProducts));
    load->product_ms_ = ms / kWarmUpProducts;
    return load;
  }
  ~ComputeLoad() {
    for (const EventHandle event : {start_, end_}) {
      if (event.valid()) WarnOfLeak("an event", world_.device().DestroyEvent(event));
    }
  }
  ComputeLoad(const ComputeLoad&) = delete;
  ComputeLoad& operator=(const ComputeLoad&) = delete;

  // Returns how many products take about `ms`; at least 1.
  int64_t ProductsFor(double ms) const {
    return std::max<int64_t>(1, std::llround(ms / product_ms_));
  }

  // Runs `products` for each transfer. Measures the products alone first.
  absl::StatusOr<BenchTime> TimeCopies(CopyMethod& method, const BenchCase& of, int64_t products) {
    BenchTime time;
    const int64_t all_products = products * static_cast<int64_t>(of.transfers);
    PINION_ASSIGN_OR_RETURN(time.compute_alone_ms, TimeAlone(all_products));
    const double start_ms = world_.now_ms();
    const bool after = of.setting == BenchSetting::kAfterCompute;
    if (after) PINION_RETURN_IF_ERROR(Record(start_));
    for (uint64_t i = 0; i < of.transfers; ++i) {
      if (after) Enqueue(products);
      PINION_RETURN_IF_ERROR(method.Submit(after ? world_.compute() : world_.idle()));
    }
    if (!after) {
      // Recorded here, so that the products' time excludes the host's submissions.
      PINION_RETURN_IF_ERROR(Record(start_));
      Enqueue(all_products);
    }
    PINION_RETURN_IF_ERROR(Record(end_));
    time.host_ms = world_.now_ms() - start_ms;
    PINION_RETURN_IF_ERROR(method.Wait());
    time.ms = world_.now_ms() - start_ms;
    PINION_ASSIGN_OR_RETURN(time.compute_ms, ElapsedMs());
    return time;
  }

 private:
  ComputeLoad(CopyWorld& world, at::Tensor factor)
      : world_(world), factor_(std::move(factor)), product_(at::empty_like(factor_)) {}

  void Enqueue(int64_t products) {
    for (int64_t i = 0; i < products; ++i) at::mm_out(product_, factor_, factor_);
  }
  absl::Status Record(EventHandle event) {
    return world_.device().RecordEvent(event, world_.compute());
  }
  // Returns the time between the two events. Blocks until the compute stream is idle.
  absl::StatusOr<double> ElapsedMs() {
    PINION_RETURN_IF_ERROR(world_.device().SynchronizeStream(world_.compute()));
    return world_.device().ElapsedMs(start_, end_);
  }
  absl::StatusOr<double> TimeAlone(int64_t products) {
    PINION_RETURN_IF_ERROR(world_.SynchronizeAll());
    PINION_RETURN_IF_ERROR(Record(start_));
    Enqueue(products);
    PINION_RETURN_IF_ERROR(Record(end_));
    return ElapsedMs();
  }

  CopyWorld& world_;
  EventHandle start_, end_;
  const at::Tensor factor_;
  at::Tensor product_;
  double product_ms_ = 0;
};

double WallMs() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

using MeasureCase = std::function<absl::StatusOr<BenchTime>()>;

// Returns the measurement of TransferEngine::Submit's wall time on a device that does nothing: the
// median of calls in close succession. Batches are built before. `of` has one direction.
absl::StatusOr<MeasureCase> SubmitCost(const BenchCase& of) {
  // More than the engine queues before it queries the device, few enough for the cache.
  constexpr int kSubmits = 64;
  auto device = std::make_shared<NullDevice>(of.setting == BenchSetting::kEventsPending
                                                 ? NullDevice::Events::kPending
                                                 : NullDevice::Events::kDone);
  PINION_ASSIGN_OR_RETURN(const StreamHandle compute, device->CreateStream("compute"));
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<CopyWorld> world,
                          CopyWorld::Create(device, compute, WallMs));
  // Scattered pieces are apart and in random order, like tensors saved over time.
  const bool scattered = of.method == BenchMethod::kScattered;
  const uint64_t stride_bytes = of.piece_bytes * (scattered ? 2 : 1);
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<void> memory,
                          world->NewDeviceMemory(of.pieces * stride_bytes));
  std::vector<char*> pieces;  // of one batch, in the host's order
  for (uint64_t i = 0; i < of.pieces; ++i) {
    pieces.push_back(static_cast<char*>(memory.get()) + i * stride_bytes);
  }
  if (scattered) std::shuffle(pieces.begin(), pieces.end(), std::mt19937_64(1));
  std::vector<std::shared_ptr<HostBuffer>> hosts(kSubmits);  // one per batch
  for (std::shared_ptr<HostBuffer>& host : hosts) {
    PINION_ASSIGN_OR_RETURN(host, world->NewHostMemory(of.pieces * of.piece_bytes));
  }
  return [=, keep = memory]() -> absl::StatusOr<BenchTime> {
    std::vector<CopyBatch> batches;
    for (const std::shared_ptr<HostBuffer>& host : hosts) {
      CopyBatch& batch = batches.emplace_back(DirectionOf(of.flow));
      for (size_t i = 0; i < pieces.size(); ++i) {
        batch.Add(host, i * of.piece_bytes, pieces[i], of.piece_bytes);
      }
    }
    std::vector<Transfer> transfers;
    transfers.reserve(batches.size());
    // Timed one by one: other programs interrupt some calls, which the median ignores.
    std::vector<double> times_ms;
    for (CopyBatch& batch : batches) {
      const double start_ms = WallMs();
      PINION_ASSIGN_OR_RETURN(Transfer transfer, world->engine().Submit(batch, world->compute()));
      times_ms.push_back(WallMs() - start_ms);
      transfers.push_back(std::move(transfer));
    }
    PINION_RETURN_IF_ERROR(world->SynchronizeAll());
    const double ms = Summarize(std::move(times_ms)).median;
    return BenchTime{.ms = ms, .host_ms = ms};
  };
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
  static absl::StatusOr<std::unique_ptr<EngineBench>> Create(const RunOptions& options) {
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
        bench->load_,
        ComputeLoad::Create(world, opened.device(),
                            opened.machine() == nullptr ? kGpuWidth : kEmulatedWidth));
    // Creates events and the driver's state.
    const BenchCase warm_up = {
        .flow = BenchFlow::kDuplex, .method = BenchMethod::kEngine, .piece_bytes = 4096};
    PINION_ASSIGN_OR_RETURN(const std::unique_ptr<CopyMethod> method, NewCopies(world, warm_up));
    PINION_RETURN_IF_ERROR(TimeCopies(world, *method, /*transfers=*/32).status());
    return bench;
  }

  std::string Header() const {
    // A modelled device's model names its link.
    const bool names_link = info_.modelled || info_.link_name.empty();
    return absl::StrCat(name_, ", ", info_.model, names_link ? "" : " on ",
                        names_link ? "" : info_.link_name, "\n", link_.ToString());
  }

  void Register(const BenchCase& of) {
    const bool submits = of.section == BenchSection::kSubmit;
    const int measured_runs = info_.modelled ? kModelledRuns : kMeasuredRuns;
    benchmarks_.Register(CaseName(of), submits ? benchmark::kNanosecond : benchmark::kMicrosecond,
                         submits ? kSubmitRuns : measured_runs,
                         [this, of](benchmark::State& state) { return Measure(of, state); });
  }

  void AddTo(BenchReport& report) const {
    for (const BenchRow& row : rows_) {
      nlohmann::ordered_json json = {
          {"case", CaseName(row.of)}, {"modelled", Modelled(row.of)}, {"ms", row.time.ms}};
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
    AddEngineGoals(rows_, link_, report);
  }

  // Fail if a case cannot be measured or leaves wrong bytes.
  CheckedBenchmarks& benchmarks() { return benchmarks_; }

 private:
  explicit EngineBench(Accelerator accelerator) : accelerator_(std::move(accelerator)) {}

  bool Modelled(const BenchCase& of) const {
    return info_.modelled && of.section != BenchSection::kSubmit;
  }

  absl::StatusOr<std::unique_ptr<CopyMethod>> MethodOf(const BenchCase& of) {
    if (of.section == BenchSection::kSubmit) return nullptr;
    if (of.method != BenchMethod::kPacked) return NewCopies(*world_, of);
    return NewPackedCopies(*world_, accelerator_.device(), of);
  }

  absl::StatusOr<MeasureCase> MeasureOf(const BenchCase& of, CopyMethod* method) {
    if (method == nullptr) return SubmitCost(of);
    if (of.section != BenchSection::kCompute) {
      return [=, this] { return TimeCopies(*world_, *method, of.transfers); };
    }
    const int64_t products = load_->ProductsFor(link_.d2h.CopyUs(of.piece_bytes) * 1e-3);
    return [=, this] { return load_->TimeCopies(*method, of, products); };
  }

  absl::Status Measure(const BenchCase& of, benchmark::State& state) {
    PINION_ASSIGN_OR_RETURN(const std::unique_ptr<CopyMethod> method, MethodOf(of));
    PINION_ASSIGN_OR_RETURN(const MeasureCase measure, MeasureOf(of, method.get()));
    if (!Modelled(of)) PINION_RETURN_IF_ERROR(measure().status());  // warms up
    std::vector<BenchTime> times;
    for ([[maybe_unused]] auto _ : state) {
      PINION_ASSIGN_OR_RETURN(const BenchTime time, measure());
      state.SetIterationTime(time.ms * 1e-3);
      times.push_back(time);
    }
    if (method != nullptr) PINION_RETURN_IF_ERROR(method->Verify());
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

  Accelerator accelerator_;
  std::string name_;
  DeviceInfo info_;
  std::unique_ptr<CopyWorld> world_;
  std::unique_ptr<ComputeLoad> load_;
  LinkCalibration link_;
  std::vector<BenchRow> rows_;
  CheckedBenchmarks benchmarks_;
};

absl::Status Run(BenchReport& report) {
  RunOptions options;
  PINION_ASSIGN_OR_RETURN(options.device, ChooseDevice(absl::GetFlag(FLAGS_device)));
  PINION_ASSIGN_OR_RETURN(options.preset, FindPreset(absl::GetFlag(FLAGS_preset)));
  PINION_ASSIGN_OR_RETURN(const std::unique_ptr<EngineBench> bench, EngineBench::Create(options));
  absl::PrintF("%s\n", bench->Header());
  std::fflush(stdout);
  for (const BenchCase& of : EngineBenchCases(absl::GetFlag(FLAGS_quick))) bench->Register(of);
  return bench->benchmarks().Run([&] { bench->AddTo(report); });
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  return pinion::BenchmarksMain(argc, argv, "engine_bench", "what copies cost through the engine",
                                pinion::Run);
}
