// Faults that the emulated accelerator injects.

#ifndef PINION_DEVICE_EMULATED_FAULTS_H_
#define PINION_DEVICE_EMULATED_FAULTS_H_

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"

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
  kSynchronize,
};

inline constexpr int kDeviceCallKinds = 12;

const char* DeviceCallName(DeviceCall call);  // "Allocate"

// A call that fails does nothing. A transient failure is Unavailable (ResourceExhausted for
// kAllocate and kPin), a sticky one Internal. A kernel fails in PrepareKernel, before its operator
// runs on the host.
struct Fault {
  DeviceCall call = DeviceCall::kAny;
  uint64_t at = 1;      // fails the at-th call of that kind, counted from 1 over all devices
  bool sticky = false;  // sticky: every later call of that device fails too, as CUDA latches errors
};

// One copy that is stuck for a while before its bytes move.
struct Stall {
  uint64_t at = 1;  // the at-th copy, counted from 1 over all devices
  double ms = std::numeric_limits<double>::infinity();  // of virtual time
};

struct FaultPlan {
  std::vector<Fault> calls;
  std::vector<Stall> stalls = {};
  // From the n-th copy on, counted from 1 over all devices, copies are stuck for `stall_ms` of
  // virtual time before their bytes move. 0: never.
  uint64_t stall_copies_from = 0;
  double stall_ms = std::numeric_limits<double>::infinity();

  // InvalidArgument that names the field and its value.
  absl::Status Validate() const;
};

// "emu:0", as in messages.
inline std::string EmulatedDeviceName(int device) { return "emu:" + std::to_string(device); }

// InvalidArgument that names the device and how many there are, unless it is one of them.
absl::Status CheckDeviceIndex(int device, int device_count);

// Counts calls, fails those that the plan names, and keeps the errors that stay.
//
// Thread safety: none; the machine's mutex guards it.
class FaultInjector {
 public:
  FaultInjector(FaultPlan plan, int device_count);

  // The error that stays, of a device that has one. InvalidArgument for a device that there is not:
  // every call of the machine's begins with this.
  absl::Status Check(int device) const;
  // Counts one call (not kAny) and fails it if the plan says so; a sticky fault goes before a
  // transient one.
  absl::Status Count(int device, DeviceCall call);
  // From now on Check fails with `error`, which is not empty. The first error of a device stays.
  void Break(int device, const std::string& error);

  // Calls counted so far, the failed ones included.
  uint64_t calls(DeviceCall call) const { return calls_[static_cast<int>(call)]; }

  // How long the copy that was counted last is stuck before it moves; 0: not at all.
  double StallMs() const;

 private:
  const FaultPlan plan_;
  std::array<uint64_t, kDeviceCallKinds> calls_ = {};
  std::vector<std::string> errors_;  // by device; "" while it works
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_FAULTS_H_
