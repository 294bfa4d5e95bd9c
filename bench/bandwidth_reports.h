// The results of the bandwidth program, and its reports: text, rows and goals, and nvbandwidth's
// JSON. Plain data and pure functions.

#ifndef PINION_BENCH_BANDWIDTH_REPORTS_H_
#define PINION_BENCH_BANDWIDTH_REPORTS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "pinion/bench/goals.h"
#include "pinion/device/device.h"
#include "pinion/engine/link/link_calibration.h"

namespace pinion {

struct SizePoint {
  uint64_t size_bytes = 0;
  int copies = 0;  // per sample
  Summary us;      // per copy

  // 1e9 bytes per second. The fast end is the 5th percentile of times.
  double gb_per_s() const { return GbPerS(us.median); }
  double p5_gb_per_s() const { return GbPerS(us.p95); }
  double p95_gb_per_s() const { return GbPerS(us.p5); }

 private:
  double GbPerS(double each_us) const { return static_cast<double>(size_bytes) / (each_us * 1e3); }
};

// One case with one device and one kind of memory.
struct Series {
  int column = 0;  // index of the device
  std::string device;
  std::string memory;  // MemoryKind::name
  int numa_node = -1;  // of the memory; -1: unknown
  bool remote = false;
  CopyDirection direction = CopyDirection::kHostToDevice;
  std::vector<SizePoint> points;   // by size
  std::optional<LinkCurve> curve;  // nullopt: too few sizes

  const SizePoint& largest() const { return points.back(); }
  double best_gb_per_s() const;
};

enum class CaseStatus { kPassed, kWaived, kError };
const char* CaseStatusName(CaseStatus status);  // as nvbandwidth prints them

struct CaseResult {
  std::string name;
  std::string description;  // with the unit, as nvbandwidth prints it
  CaseStatus status = CaseStatus::kPassed;
  std::string reason;    // why it did not pass
  bool latency = false;  // values are times in ns, not bandwidths in GB/s
  bool bidirectional = false;
  std::vector<Series> series;  // empty unless passed

  double Value(const SizePoint& point) const {
    return latency ? point.us.median * 1e3 : point.gb_per_s();
  }
  // Returns nvbandwidth's matrix: a row of devices, or one row per direction if both were measured.
  // Entries are the largest size in pinned memory near the device; nullopt: not measured.
  std::vector<std::vector<std::optional<double>>> Matrix(int columns) const;
};

struct DeviceResult {
  std::string name;
  DeviceInfo info;
  std::optional<LinkCalibration> calibration;
};

struct BandwidthResult {
  std::vector<DeviceResult> devices;
  bool modelled = false;
  int cuda_runtime_version = 0;  // as CUDART_VERSION; 0: no CUDA
  std::string driver_version;
  std::vector<std::string> warnings;
  std::vector<CaseResult> cases;

  const CaseResult* Find(const std::string& name) const;
};

// Returns the first series of the column and direction, which is of pinned memory near the device;
// null if there is none.
const Series* NearPinned(const CaseResult& result, int column, CopyDirection direction);

// Returns rows and goals: all bytes arrive, large copies reach the link's fitted bandwidth, and the
// engine's calibration agrees with the sweep.
BenchReport MakeReport(const BandwidthResult& result);

// Returns nvbandwidth's matrices, bandwidth by size, fitted curves, and the share of the link's
// rated speed.
std::string BandwidthText(const BandwidthResult& result);

// As in nvbandwidth, matrix entries are strings, "N/A" is an unmeasured entry, and a case is
// Passed, Waived or Error. Values are those of the largest size in pinned memory.
nlohmann::ordered_json NvbandwidthJson(const BandwidthResult& result);

}  // namespace pinion

#endif  // PINION_BENCH_BANDWIDTH_REPORTS_H_
