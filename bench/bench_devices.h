// Opens the devices that the bandwidth program measures, with their host memory.
//
// Thread safety: one thread at a time. Ownership: the devices live as long as what was opened.

#ifndef PINION_BENCH_BENCH_DEVICES_H_
#define PINION_BENCH_BENCH_DEVICES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/bench/bandwidth_cases.h"
#include "pinion/device/device_backend.h"

namespace pinion {

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
  int cuda_runtime_version = 0;  // 0: no CUDA
  std::string driver_version;
  std::vector<std::string> notes;  // bad settings
};

// NotFound if there is no such device; InvalidArgument for other names.
absl::StatusOr<BenchDevices> OpenBenchDevices(const DeviceChoice& choice);

}  // namespace pinion

#endif  // PINION_BENCH_BENCH_DEVICES_H_
