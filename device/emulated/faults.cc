#include "pinion/device/emulated/faults.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {

const char* DeviceCallName(DeviceCall call) {
  constexpr const char* kNames[kDeviceCallKinds] = {"Any",         "Allocate",    "Pin",
                                                    "Copy",        "Kernel",      "CreateStream",
                                                    "CreateEvent", "RecordEvent", "StreamWaitEvent",
                                                    "QueryEvent",  "WaitEvent",   "Synchronize"};
  return kNames[static_cast<int>(call)];
}

absl::Status FaultPlan::Validate() const {
  for (size_t i = 0; i < calls.size(); ++i) {
    if (calls[i].at == 0) {
      return absl::InvalidArgumentError("faults.calls[" + std::to_string(i) +
                                        "].at is 0; calls are counted from 1");
    }
  }
  for (size_t i = 0; i < stalls.size(); ++i) {
    if (stalls[i].at == 0) {
      return absl::InvalidArgumentError("faults.stalls[" + std::to_string(i) +
                                        "].at is 0; copies are counted from 1");
    }
    if (!(stalls[i].ms >= 0)) {
      return absl::InvalidArgumentError("faults.stalls[" + std::to_string(i) + "].ms is " +
                                        std::to_string(stalls[i].ms) + "; it must be at least 0");
    }
  }
  if (!(stall_ms >= 0)) {  // refuses NaN too
    return absl::InvalidArgumentError("faults.stall_ms is " + std::to_string(stall_ms) +
                                      "; it must be at least 0 (infinity: stuck for ever)");
  }
  return absl::OkStatus();
}

absl::Status CheckDeviceIndex(int device, int device_count) {
  if (device >= 0 && device < device_count) return absl::OkStatus();
  return absl::InvalidArgumentError("no device " + EmulatedDeviceName(device) + "; there are " +
                                    std::to_string(device_count) +
                                    " (EmulatedOptions::device_count)");
}

FaultInjector::FaultInjector(FaultPlan plan, int device_count)
    : plan_(std::move(plan)), errors_(device_count) {}

absl::Status FaultInjector::Check(int device) const {
  PINION_RETURN_IF_ERROR(CheckDeviceIndex(device, static_cast<int>(errors_.size())));
  return errors_[device].empty() ? absl::OkStatus() : absl::InternalError(errors_[device]);
}

void FaultInjector::Break(int device, const std::string& error) {
  PINION_CHECK(!error.empty()) << "a device breaks with an error that says why";
  if (errors_[device].empty()) errors_[device] = error;
}

absl::Status FaultInjector::Count(int device, DeviceCall call) {
  PINION_CHECK(call != DeviceCall::kAny) << "kAny is the sum of the others, never a call";
  ++calls_[static_cast<int>(DeviceCall::kAny)];
  ++calls_[static_cast<int>(call)];
  const Fault* hit = nullptr;
  for (const Fault& fault : plan_.calls) {
    if (fault.call != DeviceCall::kAny && fault.call != call) continue;
    if (calls(fault.call) != fault.at) continue;
    if (hit == nullptr || fault.sticky) hit = &fault;
  }
  if (hit == nullptr) return absl::OkStatus();
  const std::string message = EmulatedDeviceName(device) + ": " + DeviceCallName(call) + " call " +
                              std::to_string(calls(call)) + " failed (injected, " +
                              (hit->sticky ? "sticky)" : "transient)");
  if (hit->sticky) {
    Break(device, message + "; every later call of the device fails too");
    return Check(device);
  }
  return call == DeviceCall::kAllocate || call == DeviceCall::kPin
             ? absl::ResourceExhaustedError(message)
             : absl::UnavailableError(message);
}

double FaultInjector::StallMs() const {
  const uint64_t copy = calls(DeviceCall::kCopy);
  double ms = plan_.stall_copies_from != 0 && copy >= plan_.stall_copies_from ? plan_.stall_ms : 0;
  for (const Stall& stall : plan_.stalls) {
    if (stall.at == copy) ms = std::max(ms, stall.ms);
  }
  return ms;
}

}  // namespace pinion
