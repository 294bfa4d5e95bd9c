// Faults that the emulated accelerator injects.

#ifndef PINION_DEVICE_EMULATED_FAULTS_H_
#define PINION_DEVICE_EMULATED_FAULTS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace pinion {

// The kinds of calls that can be made to fail. kAny counts every call of every kind.
enum class DeviceCall {
  kAny,
  kAllocate,
  kPin,
  kCopy,
  kKernel,
  kCreateStream,
  kCreateEvent,
  kRecordEvent,
  kStreamWaitEvent,
  kQueryEvent,
  kWaitEvent,
};

struct Fault {
  DeviceCall call = DeviceCall::kAny;
  uint64_t at = 1;      // fails the at-th call of that kind, counted from 1 over all devices
  bool sticky = false;  // sticky: every later call of that device fails too, as CUDA latches errors
};

struct FaultPlan {
  std::vector<Fault> calls;
  // Copies of this direction's streams never finish ("h2d" or "d2h" stuck), from the at-th copy on.
  uint64_t stall_copies_from = 0;  // 0: never
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_FAULTS_H_
