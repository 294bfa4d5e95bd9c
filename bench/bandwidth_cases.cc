#include "pinion/bench/bandwidth_cases.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/link_workspace.h"
#include "pinion/engine/link/calibrate_link.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/programs/command_line.h"
#include "pinion/programs/pool_options.h"

namespace pinion {
namespace {

constexpr CopyDirection kH2d = CopyDirection::kHostToDevice;
constexpr CopyDirection kD2h = CopyDirection::kDeviceToHost;

// Samples of many small copies hide the cost of their events.
constexpr uint64_t kSampleBytes = 64 * kMiB;
constexpr int kMostCopies = 16;
// Devices of one host influence each other at any large size.
constexpr uint64_t kAllDevicesBytes = 64 * kMiB;

CopyDirection Opposite(CopyDirection direction) { return direction == kH2d ? kD2h : kH2d; }

SamplePlan PlanFor(uint64_t size_bytes, const BandwidthOptions& options) {
  SamplePlan plan;
  plan.samples = options.samples;
  uint64_t sample_bytes = kSampleBytes;
  if (options.bytes_per_size > 0) {
    sample_bytes = std::min(sample_bytes, options.bytes_per_size / 4);
  }
  plan.copies = static_cast<int>(std::clamp<uint64_t>(sample_bytes / size_bytes, 1, kMostCopies));
  if (options.bytes_per_size > 0) {
    const uint64_t affordable = options.bytes_per_size / (size_bytes * plan.copies);
    plan.samples = static_cast<int>(std::clamp<uint64_t>(affordable, 1, plan.samples));
  }
  return plan;
}

// The running cases of one run.
class Run {
 public:
  Run(const std::vector<BenchDevice>& devices, const BandwidthOptions& options,
      const Progress& progress)
      : devices_(devices), options_(options), progress_(progress) {
    for (const BenchDevice& device : devices) {
      result_.devices.push_back({device.device->name(), device.device->info(), std::nullopt});
      result_.modelled |= device.device->info().modelled;
    }
    const std::vector<std::string>& asked = options.cases;
    for (const CaseSpec& spec : BandwidthCases()) {
      if (asked.empty() || std::count(asked.begin(), asked.end(), spec.name) > 0) {
        result_.cases.push_back({spec});
      }
    }
  }

  absl::StatusOr<BandwidthResult> Execute() && {
    for (const BenchDevice& device : devices_) {
      PINION_ASSIGN_OR_RETURN(std::unique_ptr<LinkWorkspace> workspace,
                              LinkWorkspace::Create(device.device, device.memory.front()));
      workspaces_.push_back(std::move(workspace));
    }
    for (size_t column = 0; column < devices_.size(); ++column) {
      for (const MemoryKind& kind : devices_[column].memory) RunWithMemory(column, kind);
    }
    workspaces_.clear();
    for (size_t column = 0; column < devices_.size(); ++column) Calibrate(column);
    if (StopSignal() != 0) {
      result_.warnings.push_back("stopped by a signal: what is here was measured until then");
    }
    return std::move(result_);
  }

 private:
  void RunWithMemory(size_t column, const MemoryKind& kind) {
    LinkWorkspace& workspace = *workspaces_[column];
    const bool near = &kind == &devices_[column].memory.front();
    const std::string where =
        absl::StrCat(workspace.device().name(), ", ", kind.name, " memory",
                     kind.remote ? absl::StrCat(" of node ", kind.numa_node) : "");
    const absl::Status got = GetMemory(workspace, kind, where);
    for (CaseResult& result : result_.cases) {
      const CaseSpec& spec = result.of;
      if (!near && (spec.bidirectional || spec.all_devices)) continue;
      if (!result.status.ok() || StopSignal() != 0) continue;
      progress_(absl::StrCat(spec.name, ", ", where));
      Series series = {.device = workspace.device().name(),
                       .memory = kind.name,
                       .numa_node = workspace.numa_node(),
                       .remote = kind.remote};
      result.status = got;
      if (result.status.ok()) result.status = AddTraffic(spec, column);
      if (result.status.ok()) result.status = Sweep(spec, workspace, series);
      result.status.Update(workspace.meter().ClearTraffic());
      if (!result.status.ok()) {
        result.series.clear();
      } else if (!series.points.empty()) {
        result.series.push_back(std::move(series));
      }
    }
  }

  // Allocates as much as possible, down to a size that still measures the link.
  absl::Status GetMemory(LinkWorkspace& workspace, const MemoryKind& kind,
                         const std::string& where) {
    absl::Status got;
    const uint64_t least_bytes = std::min(options_.max_bytes, 16 * kMiB);
    for (uint64_t size = options_.max_bytes; size >= least_bytes; size /= 2) {
      got = workspace.Use(kind, size);
      if (got.ok() && size < options_.max_bytes) {
        result_.warnings.push_back(
            absl::StrCat(where, ": no memory for copies of more than ", HumanBytes(size)));
      }
      if (!absl::IsResourceExhausted(got)) break;
    }
    return got;
  }

  absl::Status AddTraffic(const CaseSpec& spec, size_t column) {
    LinkMeter& meter = workspaces_[column]->meter();
    const auto add = [&meter](LinkWorkspace& workspace, CopyDirection direction) {
      return meter.AddTraffic(workspace.device(), direction, workspace.traffic(direction));
    };
    if (spec.bidirectional) {
      PINION_RETURN_IF_ERROR(add(*workspaces_[column], Opposite(spec.direction)));
    }
    for (size_t other = 0; spec.all_devices && other < workspaces_.size(); ++other) {
      if (other == column) continue;
      PINION_RETURN_IF_ERROR(add(*workspaces_[other], spec.direction));
      if (spec.bidirectional) {
        PINION_RETURN_IF_ERROR(add(*workspaces_[other], Opposite(spec.direction)));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Sweep(const CaseSpec& spec, LinkWorkspace& workspace, Series& series) {
    std::vector<uint64_t> sizes = SweepSizes(options_);
    if (spec.all_devices) sizes = {std::min(kAllDevicesBytes, options_.max_bytes)};
    std::vector<CopyTime> medians;
    for (const uint64_t size_bytes : sizes) {
      if (size_bytes > workspace.size_bytes() || StopSignal() != 0) break;
      PINION_ASSIGN_OR_RETURN(const SizePoint point,
                              MeasurePoint(workspace, spec.direction, size_bytes));
      series.points.push_back(point);
      medians.push_back({size_bytes, point.us.median});
    }
    if (medians.size() > 2) {
      if (absl::StatusOr<LinkCurve> curve = FitLinkCurve(medians); curve.ok())
        series.curve = *curve;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<SizePoint> MeasurePoint(LinkWorkspace& workspace, CopyDirection direction,
                                         uint64_t size_bytes) {
    const SamplePlan plan = PlanFor(size_bytes, options_);
    PINION_ASSIGN_OR_RETURN(SampleTimes us, workspace.Measure(direction, size_bytes, plan));
    return SizePoint{size_bytes, plan.copies, Summarize(std::move(us))};
  }

  void Calibrate(size_t column) {
    if (StopSignal() != 0) return;
    progress_(absl::StrCat("calibration, ", result_.devices[column].name));
    const absl::StatusOr<LinkCalibration> link = [&]() -> absl::StatusOr<LinkCalibration> {
      PINION_ASSIGN_OR_RETURN(
          const std::shared_ptr<PinnedAllocator> allocator,
          PinnedAllocator::Create(PoolWithoutWatermarks(), devices_[column].memory.front().source));
      return CalibrateLink(*devices_[column].device, *allocator);
    }();
    if (link.ok()) {
      result_.devices[column].calibration = *link;
    } else {
      result_.warnings.push_back(absl::StrCat(
          result_.devices[column].name, " could not be calibrated: ", link.status().message()));
    }
  }

  const std::vector<BenchDevice>& devices_;
  const BandwidthOptions& options_;
  const Progress& progress_;
  std::vector<std::unique_ptr<LinkWorkspace>> workspaces_;
  BandwidthResult result_;
};

}  // namespace

const std::vector<CaseSpec>& BandwidthCases() {
  constexpr bool kBidirectional = true, kAll = true;
  static const auto& cases = *new std::vector<CaseSpec>{
      {"host_to_device_memcpy_ce", kH2d},
      {"device_to_host_memcpy_ce", kD2h},
      {"host_to_device_bidirectional_memcpy_ce", kH2d, kBidirectional},
      {"device_to_host_bidirectional_memcpy_ce", kD2h, kBidirectional},
      {"all_to_host_memcpy_ce", kD2h, false, kAll},
      {"all_to_host_bidirectional_memcpy_ce", kD2h, kBidirectional, kAll},
      {"host_to_all_memcpy_ce", kH2d, false, kAll},
      {"host_to_all_bidirectional_memcpy_ce", kH2d, kBidirectional, kAll},
  };
  return cases;
}

std::vector<uint64_t> SweepSizes(const BandwidthOptions& options) {
  std::vector<uint64_t> sizes;
  for (uint64_t size = options.min_bytes; size < options.max_bytes; size *= 4)
    sizes.push_back(size);
  sizes.push_back(options.max_bytes);
  return sizes;
}

absl::Status BandwidthOptions::Validate() const {
  if (min_bytes < kKiB || min_bytes > max_bytes || max_bytes > 64 * kGiB) {
    return absl::InvalidArgumentError(absl::StrCat("sizes from ", min_bytes, " to ", max_bytes,
                                                   " bytes: they must be from 1 KiB to 64 GiB"));
  }
  if (min_bytes % kKiB != 0 || max_bytes % kKiB != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("sizes from ", min_bytes, " to ", max_bytes, " bytes: whole KiB, please"));
  }
  if (samples < 1 || samples > 10000) {
    return absl::InvalidArgumentError(
        absl::StrCat("samples is ", samples, "; it must be from 1 to 10000"));
  }
  std::vector<std::string> known;
  for (const CaseSpec& spec : BandwidthCases()) known.push_back(spec.name);
  for (const std::string& name : cases) {
    if (std::count(known.begin(), known.end(), name) == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("no case \"", name, "\"; there are: ", absl::StrJoin(known, ", ")));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<BandwidthResult> RunBandwidth(const std::vector<BenchDevice>& devices,
                                             const BandwidthOptions& options,
                                             const Progress& progress) {
  PINION_CHECK(!devices.empty()) << "no devices";
  return Run(devices, options, progress).Execute();
}

}  // namespace pinion
