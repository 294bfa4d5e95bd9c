// nvbandwidth's host-device cases, measured.
//
// As nvbandwidth does, a case reports the copies of one direction and one device, while other
// copies may keep the link or the host's memory busy: those of the other direction (bidirectional)
// or of the other devices (all). Unlike it, we measure a range of sizes, other kinds of host
// memory, say how far samples scatter, and keep the other copies going at full speed for small
// sizes too.
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
#include "pinion/bench/bandwidth_result.h"
#include "pinion/bench/link_workspace.h"
#include "pinion/device/device.h"

namespace pinion {

struct BandwidthOptions {
  uint64_t min_bytes = 4 * kKiB;  // sizes are this times powers of four,
  uint64_t max_bytes = kGiB;      // and this
  int samples = 10;
  // At most this much is moved per size, while there is one sample at least. 0: no limit. For
  // modelled devices, whose copies all take the same time but move real bytes.
  uint64_t bytes_per_size = 0;
  std::vector<std::string> cases;  // names; empty: all

  // InvalidArgument that names the field, its value and what it must be.
  absl::Status Validate() const;
};

struct BenchDevice {
  std::shared_ptr<Device> device;
  std::vector<MemoryKind> memory;  // not empty; the first is pinned memory near the device
  // Nanoseconds of one dependent read of host memory by the device. Empty: no such probe, and the
  // text says why.
  std::function<absl::StatusOr<double>()> read_latency_ns;
  std::string no_read_latency;
};

struct CaseSpec {
  const char* name;
  const char* description;
  CopyDirection direction;
  bool bidirectional;
  bool all_devices;
};

// All but the two latency cases, which have no direction of their own.
const std::vector<CaseSpec>& BandwidthCases();
std::vector<std::string> CaseNames();

std::vector<uint64_t> SweepSizes(const BandwidthOptions& options);

using Progress = std::function<void(const std::string& what)>;

// Never fails as a whole: what goes wrong is in the cases and in the warnings.
BandwidthResult RunBandwidth(const std::vector<BenchDevice>& devices,
                             const BandwidthOptions& options, const Progress& progress);

}  // namespace pinion

#endif  // PINION_BENCH_BANDWIDTH_CASES_H_
