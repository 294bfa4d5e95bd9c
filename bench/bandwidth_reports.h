// The results of the bandwidth program: plain data, its rows and its goals.

#ifndef PINION_BENCH_BANDWIDTH_REPORTS_H_
#define PINION_BENCH_BANDWIDTH_REPORTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "pinion/bench/goals.h"
#include "pinion/device/device.h"
#include "pinion/engine/link/link_calibration.h"

namespace pinion {

struct SizePoint {
  uint64_t size_bytes = 0;
  int copies = 0;  // per sample
  Summary us;      // per copy

  // 1e9 bytes per second.
  double gb_per_s() const { return static_cast<double>(size_bytes) / (us.median * 1e3); }
};

// One case with one device and one kind of memory.
struct Series {
  std::string device;
  std::string memory;  // MemoryKind::name
  int numa_node = -1;  // of the memory; -1: unknown
  bool remote = false;
  std::vector<SizePoint> points = {};             // by size
  std::optional<LinkCurve> curve = std::nullopt;  // nullopt: too few sizes
};

struct CaseSpec {
  const char* name = "";
  CopyDirection direction = CopyDirection::kHostToDevice;
  bool bidirectional = false;
  bool all_devices = false;
};

struct CaseResult {
  CaseSpec of;
  absl::Status status = absl::OkStatus();
  // By device; pinned memory near the device comes first. Empty after an error.
  std::vector<Series> series = {};

  // Returns the series in pinned memory near the device; null if there is none.
  const Series* NearPinned(const std::string& device) const;
};

struct DeviceResult {
  std::string name;
  DeviceInfo info;
  std::optional<LinkCalibration> calibration;
};

struct BandwidthResult {
  std::vector<DeviceResult> devices;
  bool modelled = false;
  std::vector<std::string> warnings;
  std::vector<CaseResult> cases;

  const CaseResult* Find(const std::string& name) const;
};

// Prints the warnings and rows, and adds rows and goals: all bytes arrive, large copies reach the
// link's fitted bandwidth, and the engine's calibration agrees with the sweep.
void AddBandwidth(const BandwidthResult& result, BenchReport& report);

}  // namespace pinion

#endif  // PINION_BENCH_BANDWIDTH_REPORTS_H_
