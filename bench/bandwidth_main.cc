// Measures a PCIe or NVLink-C2C link, of CUDA or of the emulated device: nvbandwidth's host-device
// cases over sizes and kinds of host memory. docs/results/benchmarks.md explains the results.
//
//   ./bazelw run --config=opt //bench:bandwidth -- --json=/tmp/bandwidth.json

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/bandwidth_cases.h"
#include "pinion/bench/bandwidth_reports.h"
#include "pinion/bench/bench_main.h"
#include "pinion/bench/goals.h"
#include "pinion/programs/command_line.h"

ABSL_FLAG(std::string, device, "",
          "cuda, cuda:N, emu or emu:N: all devices of a kind, or one; default: cuda where there is "
          "a device, else emu");
ABSL_FLAG(std::string, preset, "h100_pcie5",
          "emulated devices: a100_pcie4, h100_pcie5, b200_pcie5, gh200_c2c or gb200_c2c");
ABSL_FLAG(int, emulated_devices, 1, "how many there are");
ABSL_FLAG(std::vector<std::string>, cases, {}, "comma-separated names; default: all");
ABSL_FLAG(uint64_t, min_kib, 4, "smallest copy");
ABSL_FLAG(
    uint64_t, max_kib, 0,
    "largest copy; default: 1048576 (1 GiB), on emulated devices 65536, beyond which the model has "
    "nothing to tell");
ABSL_FLAG(int, samples, 10,
          "per size, of which the median is reported; fewer of large copies on emulated devices");
ABSL_FLAG(bool, quick, false, "copies of up to 16 MiB and few samples, for a first look");

namespace pinion {
namespace {

// Modelled times do not scatter, but copies move real bytes.
constexpr uint64_t kModelledBytesPerSize = 64 * kMiB;
constexpr uint64_t kModelledMaxBytes = 64 * kMiB;
constexpr uint64_t kQuickBytes = 16 * kMiB;
constexpr int kQuickSamples = 3;

BandwidthOptions OptionsFromFlags(bool modelled) {
  BandwidthOptions options;
  options.min_bytes = absl::GetFlag(FLAGS_min_kib) * kKiB;
  if (modelled) {
    options.max_bytes = kModelledMaxBytes;
    options.bytes_per_size = kModelledBytesPerSize;
  }
  if (const uint64_t max_kib = absl::GetFlag(FLAGS_max_kib); max_kib > 0) {
    options.max_bytes = max_kib * kKiB;
  }
  options.samples = absl::GetFlag(FLAGS_samples);
  options.cases = absl::GetFlag(FLAGS_cases);
  if (absl::GetFlag(FLAGS_quick)) {
    options.max_bytes = std::min(options.max_bytes, kQuickBytes);
    options.samples = std::min(options.samples, kQuickSamples);
    options.bytes_per_size = kQuickBytes;
  }
  return options;
}

absl::Status Run(BenchReport& report) {
  DeviceChoice choice;
  choice.device = absl::GetFlag(FLAGS_device);
  choice.preset = absl::GetFlag(FLAGS_preset);
  choice.emulated_devices = absl::GetFlag(FLAGS_emulated_devices);
  PINION_ASSIGN_OR_RETURN(BenchDevices opened, OpenBenchDevices(choice));
  const bool modelled = opened.devices.front().device->info().modelled;
  const BandwidthOptions options = OptionsFromFlags(modelled);
  PINION_RETURN_IF_ERROR(options.Validate());
  StopBySignal();
  const auto show = [](const std::string& what) { std::cerr << "measuring " << what << std::endl; };
  PINION_ASSIGN_OR_RETURN(BandwidthResult result, RunBandwidth(opened.devices, options, show));
  result.warnings.insert(result.warnings.begin(), opened.notes.begin(), opened.notes.end());
  AddBandwidth(result, report);
  return absl::OkStatus();
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  const int exit_code = pinion::BenchMain(
      argc, argv, "bandwidth",
      "Measures copies between the host and its devices as nvbandwidth does, over sizes and kinds "
      "of host memory. Exits with 1 when a goal is missed, with 2 when it cannot run",
      pinion::Run);
  return pinion::StopSignal() == 0 ? exit_code : 128 + pinion::StopSignal();
}
