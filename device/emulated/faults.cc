#include "pinion/device/emulated/faults.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "pinion/allocator/base/check.h"

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
  if (!(stall_ms >= 0)) {  // NaN is refused, too
    return absl::InvalidArgumentError("faults.stall_ms is " + std::to_string(stall_ms) +
                                      "; it must be at least 0 (infinity: stuck for ever)");
  }
  return absl::OkStatus();
}

FaultInjector::FaultInjector(FaultPlan plan) : plan_(std::move(plan)) {}

std::optional<Fault> FaultInjector::Count(DeviceCall call) {
  PINION_CHECK(call != DeviceCall::kAny) << "kAny is the sum of the others, never a call";
  ++calls_[static_cast<int>(DeviceCall::kAny)];
  ++calls_[static_cast<int>(call)];
  std::optional<Fault> hit;
  for (const Fault& fault : plan_.calls) {
    if (fault.call != DeviceCall::kAny && fault.call != call) continue;
    if (calls(fault.call) != fault.at) continue;
    if (!hit.has_value() || fault.sticky) hit = fault;
  }
  return hit;
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
