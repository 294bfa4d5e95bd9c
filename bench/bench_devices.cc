#include <cstdlib>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/allocator/sources/numa.h"
#include "pinion/bench/bandwidth_cases.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"

namespace pinion {
namespace {

constexpr int kMaxNumaNodes = 64;

// Returns the index in "cuda:1"; nullopt for "cuda".
absl::StatusOr<std::optional<int>> IndexIn(const std::string& name) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(name, absl::MaxSplits(':', 1));
  if (!absl::StrContains(name, ':')) return std::nullopt;
  int index = 0;
  if (absl::SimpleAtoi(parts.second, &index) && index >= 0) return index;
  return absl::InvalidArgumentError(
      absl::StrCat("--device=", name, " names no device: use cuda, cuda:0, emu or emu:0"));
}

absl::StatusOr<std::vector<BenchDevice>> Open(const DeviceBackend& backend, const std::string& name,
                                              int count) {
  PINION_ASSIGN_OR_RETURN(const std::optional<int> only, IndexIn(name));
  std::vector<BenchDevice> devices;
  for (int index = only.value_or(0); index < (only ? *only + 1 : count); ++index) {
    BenchDevice device;
    PINION_ASSIGN_OR_RETURN(device.device, backend.device(index));
    devices.push_back(std::move(device));
  }
  return devices;
}

// Adds pinned and pageable memory near the device, then pinned memory of other nodes.
absl::Status AddCudaMemory(BenchDevice& device) {
  const int near = device.device->info().numa_node;
  MemoryKind pinned = {
      .name = "pinned", .source = device.device->pinned_source(), .numa_node = near};
  device.memory.push_back(pinned);
  MmapOptions options;
  options.numa_node = CheckNumaNode(near).ok() ? near : -1;
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<MmapSource> mapped, MmapSource::Create(options));
  device.memory.push_back(
      {.name = "pageable", .source = mapped, .pinned = false, .numa_node = near});
  pinned.remote = true;
  for (int node = 0; node < kMaxNumaNodes; ++node) {
    if (near < 0 || node == near || !CheckNumaNode(node).ok()) continue;
    pinned.numa_node = node;
    device.memory.push_back(pinned);
  }
  return absl::OkStatus();
}

absl::StatusOr<BenchDevices> OpenCuda(const std::string& name) {
  BenchDevices opened;
  opened.backend = CudaBackend();
  PINION_ASSIGN_OR_RETURN(const int count, CudaDeviceCount());
  PINION_ASSIGN_OR_RETURN(opened.devices, Open(opened.backend, name, count));
  for (BenchDevice& device : opened.devices) {
    PINION_RETURN_IF_ERROR(AddCudaMemory(device));
  }
  const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (connections != nullptr && std::string(connections) == "1") {
    opened.notes.push_back(
        "CUDA_DEVICE_MAX_CONNECTIONS=1 lets copies and kernels wait for each other; unset it");
  }
  return opened;
}

absl::StatusOr<BenchDevices> OpenEmulated(const std::string& name, const DeviceChoice& choice) {
  EmulatedOptions options;
  PINION_ASSIGN_OR_RETURN(options.preset, FindPreset(choice.preset));
  options.device_count = choice.emulated_devices;
  if (choice.emulated_memory_bytes > 0) options.memory_bytes = choice.emulated_memory_bytes;
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<EmulatedMachine> machine,
                          EmulatedMachine::Create(options));
  BenchDevices opened;
  opened.backend = EmulatedBackend(std::move(machine));
  PINION_ASSIGN_OR_RETURN(opened.devices, Open(opened.backend, name, choice.emulated_devices));
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<MmapSource> pageable, MmapSource::Create());
  for (BenchDevice& device : opened.devices) {
    device.memory = {{.name = "pinned", .source = device.device->pinned_source()},
                     {.name = "pageable", .source = pageable, .pinned = false}};
  }
  return opened;
}

}  // namespace

absl::StatusOr<BenchDevices> OpenBenchDevices(const DeviceChoice& choice) {
  std::string name = choice.device;
  if (name.empty()) name = CudaDeviceCount().ok() ? "cuda" : "emu";
  if (name == "cuda" || absl::StartsWith(name, "cuda:")) return OpenCuda(name);
  if (name == "emu" || absl::StartsWith(name, "emu:")) return OpenEmulated(name, choice);
  return absl::InvalidArgumentError(
      absl::StrCat("--device=", name, " names no device: use cuda, cuda:0, emu or emu:0"));
}

}  // namespace pinion
