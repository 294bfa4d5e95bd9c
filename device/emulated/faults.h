// Describes and injects device faults: failing calls and stalled copies on the emulated
// accelerator.
//
//   options.faults.calls = {{.call = DeviceCall::kAllocate, .at = 3}};

#ifndef PINION_DEVICE_EMULATED_FAULTS_H_
#define PINION_DEVICE_EMULATED_FAULTS_H_

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace pinion {

// The kinds of calls that can fail. kAny counts all calls.
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

// A failing call; it has no effect. A transient failure is Unavailable (ResourceExhausted for
// kAllocate and kPin), a sticky one Internal. Kernels fail in PrepareKernel, before they run.
struct Fault {
  DeviceCall call = DeviceCall::kAny;
  uint64_t at = 1;      // the at-th call of that kind fails, counted from 1 over all devices
  bool sticky = false;  // true: every later call of that device fails too, as in CUDA
};

// A copy that is stuck for a while before its bytes move.
struct Stall {
  uint64_t at = 1;  // the at-th copy, counted from 1 over all devices
  double ms = std::numeric_limits<double>::infinity();  // of virtual time
};

struct FaultPlan {
  std::vector<Fault> calls;
  std::vector<Stall> stalls = {};
  // Every copy from the n-th on, counted from 1 over all devices, is stuck for `stall_ms` of
  // virtual time before its bytes move. 0: never.
  uint64_t stall_copies_from = 0;
  double stall_ms = std::numeric_limits<double>::infinity();

  // Returns InvalidArgument that names the field and its value.
  absl::Status Validate() const;
};

// Returns the name that messages use: "emu:0".
inline std::string EmulatedDeviceName(int device) { return "emu:" + std::to_string(device); }

// Returns InvalidArgument, with the number of devices, if `device` is no valid index.
absl::Status CheckDeviceIndex(int device, int device_count);

// Counts calls, fails the calls that the plan names, and keeps sticky errors.
//
// Thread safety: none; the machine's mutex guards it.
class FaultInjector {
 public:
  FaultInjector(FaultPlan plan, int device_count);

  // Returns the device's sticky error, or InvalidArgument for an invalid index. Every call of the
  // machine begins with this check.
  absl::Status Check(int device) const;
  // Counts one call (never kAny) and returns its planned fault, sticky ones first.
  absl::Status Count(int device, DeviceCall call);
  // Makes Check fail with `error` (not empty) from here on. A device keeps its first error.
  void Break(int device, const std::string& error);

  // Returns the number of calls so far, including failed ones.
  uint64_t calls(DeviceCall call) const { return calls_[static_cast<int>(call)]; }

  // Returns how long the last counted copy is stuck before it moves; 0: not at all.
  double StallMs() const;

 private:
  const FaultPlan plan_;
  std::array<uint64_t, kDeviceCallKinds> calls_ = {};
  std::vector<std::string> errors_;  // by device; "" without an error
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_FAULTS_H_
