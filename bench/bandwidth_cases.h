// Measures nvbandwidth's host-device cases.
//
// A case reports copies of one direction and one device, as in nvbandwidth. Other copies may keep
// the link or the host's memory busy: those of the other direction (bidirectional) or of other
// devices (all). Differences: a sweep of sizes, more kinds of host memory, the spread of samples,
// and other copies at full speed for small sizes too.
//
// Thread safety: one thread at a time.

#ifndef PINION_BENCH_BANDWIDTH_CASES_H_
#define PINION_BENCH_BANDWIDTH_CASES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/bench/bandwidth_reports.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"

namespace pinion {

struct BandwidthOptions {
  uint64_t min_bytes = 4 * kKiB;  // sizes are min_bytes times powers of four,
  uint64_t max_bytes = kGiB;      // and max_bytes
  int samples = 10;
  // Most bytes moved per size; at least one sample runs. 0: no limit. For modelled devices, whose
  // times do not scatter although their copies move real bytes.
  uint64_t bytes_per_size = 0;
  std::vector<std::string> cases;  // names; empty: all

  // InvalidArgument names the field, its value and the valid range.
  absl::Status Validate() const;
};

// Host memory of one kind, as the host's end of copies.
struct MemoryKind {
  std::string name;  // "pinned", "pageable"
  std::shared_ptr<HostMemorySource> source;
  bool pinned = true;
  int numa_node = -1;   // node that allocates the memory; -1: any
  bool remote = false;  // the device is on another node
};

struct BenchDevice {
  std::shared_ptr<Device> device;
  std::vector<MemoryKind> memory;  // not empty; the first is pinned memory near the device
};

const std::vector<CaseSpec>& BandwidthCases();

std::vector<uint64_t> SweepSizes(const BandwidthOptions& options);

using Progress = std::function<void(const std::string& what)>;

// Cases and warnings contain the errors. Exception: a device without 24 MiB for copies of its own.
absl::StatusOr<BandwidthResult> RunBandwidth(const std::vector<BenchDevice>& devices,
                                             const BandwidthOptions& options,
                                             const Progress& progress);

// Opens the devices to measure, with their host memory. The devices live as long as what was
// opened.
struct DeviceChoice {
  // All devices of a kind ("cuda", "emu") or one ("cuda:N", "emu:N"). Empty: "cuda" if there is a
  // CUDA device, else "emu".
  std::string device;
  std::string preset = "h100_pcie5";  // of emulated devices
  int emulated_devices = 1;
  uint64_t emulated_memory_bytes = 0;  // of each
};

struct BenchDevices {
  DeviceBackend backend;  // keeps the devices alive
  std::vector<BenchDevice> devices;
  std::vector<std::string> notes;  // bad settings
};

// NotFound if there is no such device; InvalidArgument for other names.
absl::StatusOr<BenchDevices> OpenBenchDevices(const DeviceChoice& choice);

}  // namespace pinion

#endif  // PINION_BENCH_BANDWIDTH_CASES_H_
