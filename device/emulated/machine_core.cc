#include "pinion/device/emulated/machine_core.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/engines.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/device/host_arithmetic.h"

namespace pinion {

MachineCore::MachineCore(const EmulatedOptions& options,
                         std::vector<std::unique_ptr<MemoryArena>> arenas)
    : options(options),
      arenas(std::move(arenas)),
      trace(options.record_trace ? std::make_unique<MachineTrace>() : nullptr),
      simulation(this->options, trace.get()),
      pinned(&simulation),
      faults(options.faults, options.device_count) {
  TakeHostArithmetic();  // belongs to an earlier machine
  MutexLock lock(mu);
  for (int device = 0; device < options.device_count; ++device) {
    if (trace != nullptr) {
      trace->NameDevice(device, EmulatedDeviceName(device) + ", " + options.preset.description);
    }
    heaps.emplace_back(device, options.memory_bytes, this->arenas[device].get(), &simulation,
                       trace.get());
    default_streams.push_back(AddStream(device, "default"));
  }
}

absl::Status MachineCore::Enter(int device, DeviceCall call, double cost_us) {
  PINION_RETURN_IF_ERROR(CheckDeviceIndex(device, options.device_count));
  SpendOnArithmetic(device);
  PINION_RETURN_IF_ERROR(faults.Check(device));
  simulation.Spend(cost_us);
  simulation.ApplySomeAtRandom();
  return faults.Count(device, call);
}

absl::Status MachineCore::EnterPin(int device, uint64_t size_bytes) {
  const double start_ms = simulation.time().now_ms();
  const double pin_us =
      options.preset.pin_ms_per_gib * 1e3 * static_cast<double>(size_bytes) / double{kGiB};
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kPin, pin_us));
  if (trace != nullptr) trace->OnPin(start_ms, simulation.time().now_ms(), size_bytes);
  return absl::OkStatus();
}

void MachineCore::SpendOnArithmetic(int device) {
  const uint64_t memory_bytes = TakeHostArithmetic();
  if (memory_bytes == 0) return;
  if (trace != nullptr) {
    trace->BeginRange("host arithmetic", memory_bytes, simulation.time().now_ms());
  }
  simulation.time().SpendOnArithmetic(
      device, static_cast<double>(memory_bytes) / (options.preset.host_memory_gb_per_s * 1e6));
  if (trace != nullptr) trace->EndRange(simulation.time().now_ms());
}

StreamHandle MachineCore::AddStream(int device, const std::string& name) {
  const std::string full_name = EmulatedDeviceName(device) + "/" + name;
  const int slot = simulation.AddStream(device, full_name);
  return handles.Add({.device = device, .slot = slot, .name = full_name});
}

absl::Status MachineCore::SubmitCopy(int slot, std::string name, std::vector<CopyPiece> pieces,
                                     CopyCost cost, bool pageable) {
  if (pageable) cost.rate_limit = options.preset.link.pageable_gb_per_s * 1e6;
  cost.latency_ms += faults.StallMs();
  simulation.SubmitCopy(slot, std::move(name), std::move(pieces), cost);
  return pageable ? simulation.Synchronize(slot) : absl::OkStatus();
}

int MachineCore::DeviceOf(const void* data) const {
  for (int device = 0; device < options.device_count; ++device) {
    if (arenas[device]->Contains(data)) return device;
  }
  return -1;
}

absl::StatusOr<MachineCore::Place> MachineCore::Locate(const void* data,
                                                       uint64_t size_bytes) const {
  if (data == nullptr && size_bytes > 0) {
    return absl::InvalidArgumentError(HumanBytes(size_bytes) +
                                      " at a null pointer: pass the address of memory");
  }
  const int device = DeviceOf(data);
  if (device < 0) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
    if (size_bytes > UINTPTR_MAX - begin) {
      return absl::InvalidArgumentError(absl::StrCat("no memory has ", size_bytes, " bytes from ",
                                                     begin, " on: pass memory of the host"));
    }
    const PinnedRanges::Overlap overlap = pinned.Find(data, size_bytes);
    if (overlap != PinnedRanges::Overlap::kPartly) {
      return Place{.pageable = overlap == PinnedRanges::Overlap::kNone};
    }
    return absl::InvalidArgumentError(HumanBytes(size_bytes) +
                                      " of host memory are not inside one pinned segment, nor "
                                      "wholly pageable: split the copy at the segment's border");
  }
  if (heaps[device].Contains(data, size_bytes)) return Place{.device = device};
  return absl::InvalidArgumentError(HumanBytes(size_bytes) + " of memory of " +
                                    EmulatedDeviceName(device) +
                                    " are not inside one live allocation (used after a free?)");
}

}  // namespace pinion
