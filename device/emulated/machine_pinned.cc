// The other memory half of MachineCore: pinned memory of the host.

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/machine_core.h"

namespace pinion {
namespace {

constexpr uint64_t kPinnedPage = 4 * kKiB;

uintptr_t HostAddress(const void* data) { return reinterpret_cast<uintptr_t>(data); }

double PinUs(const DevicePreset& preset, uint64_t size_bytes) {
  return preset.pin_ms_per_gib * 1e3 * static_cast<double>(size_bytes) / double{kGiB};
}

}  // namespace

absl::Status MachineCore::EnterPin(int device, uint64_t size_bytes) {
  const double start_ms = time_.now_ms();
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kPin, PinUs(options_.preset, size_bytes)));
  if (trace_ != nullptr) trace_->OnPin(start_ms, time_.now_ms(), size_bytes);
  return absl::OkStatus();
}

absl::StatusOr<HostSegment> MachineCore::AllocatePinned(int device, uint64_t size_bytes) {
  PINION_CHECK(size_bytes > 0 && size_bytes % kPinnedPage == 0)
      << "pinned segments are whole pages, not " << size_bytes << " bytes";
  {
    MutexLock lock(mu_);
    PINION_RETURN_IF_ERROR(EnterPin(device, size_bytes));
  }
  TwoViews views;
  if (options_.protect_host_pages) {
    PINION_ASSIGN_OR_RETURN(views, MapTwice(size_bytes));
  } else {
    views.program =
        mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  void* const data = views.program;
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError("the host has no " + HumanBytes(size_bytes) +
                                        " for emulated pinned memory: " + std::strerror(errno));
  }
  MutexLock lock(mu_);
  if (protection_ != nullptr) protection_->AddSegment(views, size_bytes);
  AddPinned(data, size_bytes);
  return HostSegment{data, size_bytes, -1};
}

absl::Status MachineCore::FreePinned(int device, const HostSegment& segment) {
  void* machine_view = nullptr;
  {
    MutexLock lock(mu_);
    PINION_RETURN_IF_ERROR(CheckUsable(device));
    const auto it = pinned_.find(HostAddress(segment.data));
    PINION_CHECK(it != pinned_.end() && it->second == segment.size_bytes)
        << "the segment did not come from this machine";
    PINION_RETURN_IF_ERROR(RemovePinned(segment.data));
    if (protection_ != nullptr) machine_view = protection_->RemoveSegment(segment.data);
  }
  if (machine_view != nullptr) {
    PINION_CHECK(munmap(machine_view, segment.size_bytes) == 0);
  }
  PINION_CHECK(munmap(segment.data, segment.size_bytes) == 0);
  return absl::OkStatus();
}

absl::Status MachineCore::RegisterHost(int device, void* data, uint64_t size_bytes) {
  if (options_.protect_host_pages) {
    return absl::UnimplementedError(
        "RegisterHost: protect_host_pages needs memory of the machine's own");
  }
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(EnterPin(device, size_bytes));
  if (size_bytes == 0 || size_bytes % kPinnedPage != 0 || HostAddress(data) % kPinnedPage != 0) {
    return absl::InvalidArgumentError("RegisterHost: not whole pages of 4 KiB");
  }
  if (int other; IsDevicePointer(data, &other) || TouchesPinned(data, size_bytes)) {
    return absl::InvalidArgumentError("RegisterHost: memory of a device, or pinned already");
  }
  AddPinned(data, size_bytes);
  return absl::OkStatus();
}

absl::Status MachineCore::UnregisterHost(int device, void* data) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(CheckUsable(device));
  if (pinned_.find(HostAddress(data)) == pinned_.end()) {
    return absl::InvalidArgumentError("UnregisterHost: this was not registered");
  }
  return RemovePinned(data);
}

void MachineCore::AddPinned(void* data, uint64_t size_bytes) {
  pinned_[HostAddress(data)] = size_bytes;
  if (options_.detect_races) {
    detector_.AddMemory(data, size_bytes, RaceDetector::kHost, "the pinning");
  }
}

// Unpinning waits for all devices, but orders nothing: who relies on it has a race.
absl::Status MachineCore::RemovePinned(void* data) {
  for (int slot = 0; slot < static_cast<int>(streams_.size()); ++slot) {
    PINION_RETURN_IF_ERROR(BlockUntil(time_.Tail(slot)));
    PINION_CHECK(effects_.Force(time_.Tail(slot)));
  }
  if (options_.detect_races) {
    detector_.RemoveMemory(data, RaceDetector::kHost, {}, "the unpinning");
    DeliverRaces();
  }
  pinned_.erase(HostAddress(data));
  return absl::OkStatus();
}

absl::Status MachineCore::HostAccess(const void* data, uint64_t size_bytes, bool write) {
  MutexLock lock(mu_);
  if (int device; IsDevicePointer(data, &device)) {
    return absl::InvalidArgumentError("HostAccess: this is memory of " + DeviceName(device));
  }
  detector_.Begin(RaceDetector::kHost, "host access");
  write ? detector_.Write(data, size_bytes) : detector_.Read(data, size_bytes);
  DeliverRaces();
  return absl::OkStatus();
}

bool MachineCore::InPinned(const void* data, uint64_t size_bytes) const {
  auto it = pinned_.upper_bound(HostAddress(data));
  if (it == pinned_.begin()) return false;
  --it;
  return HostAddress(data) + size_bytes <= it->first + it->second;
}

bool MachineCore::TouchesPinned(const void* data, uint64_t size_bytes) const {
  auto it = pinned_.lower_bound(HostAddress(data) + size_bytes);
  if (it == pinned_.begin()) return false;
  --it;
  return HostAddress(data) < it->first + it->second;
}

bool MachineCore::IsPinned(const void* data) const {
  MutexLock lock(mu_);
  return InPinned(data, 1);
}

}  // namespace pinion
