// An engine on a device whose calls can be made to fail, with its log captured.

#ifndef PINION_TESTS_ENGINE_FAULTY_WORLD_H_
#define PINION_TESTS_ENGINE_FAULTY_WORLD_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {

inline EngineOptions WithoutRetries() {
  EngineOptions options;
  options.transient_retries = 0;
  return options;
}

// A transient error and a sticky one, for a device to return.
inline absl::Status Injected() { return absl::UnavailableError("injected"); }
inline absl::Status DeviceLost() { return absl::InternalError("an ECC error"); }
inline auto IsInjected() {
  return StatusIs(absl::StatusCode::kUnavailable, ::testing::HasSubstr("injected"));
}
inline auto IsDeviceLost() {
  return StatusIs(absl::StatusCode::kInternal, ::testing::HasSubstr("an ECC error"));
}

// A device whose calls can be made to fail. Each function replaces what the last one asked for.
struct FaultyDevice {
  explicit FaultyDevice(std::shared_ptr<Device> real)
      : device(std::make_shared<ForwardingDevice>(std::move(real))) {}

  // Makes the number-th call of `call` from now on fail once with `status`.
  void FailCall(const std::string& call, int number, absl::Status status) {
    device->FailCalls([call, number, status, calls = 0](const std::string& name, uint64_t) mutable {
      return name == call && ++calls == number ? status : absl::OkStatus();
    });
  }
  void FailNext(const std::string& call, absl::Status status) {
    FailCall(call, 1, std::move(status));
  }
  // Makes all later calls of `call` fail with `status`.
  void FailAll(const std::string& call, absl::Status status) {
    device->FailCalls([call, status](const std::string& name, uint64_t) {
      return name == call ? status : absl::OkStatus();
    });
  }
  // Runs `act` inside of the number-th call of `call` from now on, before it reaches the device.
  void DuringCall(const std::string& call, int number, std::function<void()> act) {
    auto calls = std::make_shared<std::atomic<int>>(0);
    device->FailCalls([call, number, act, calls](const std::string& name, uint64_t) {
      if (name == call && ++*calls == number) act();
      return absl::OkStatus();
    });
  }
  // Counts later calls of `call`.
  std::shared_ptr<int> CountCalls(const std::string& call) {
    auto count = std::make_shared<int>(0);
    device->FailCalls([call, count](const std::string& name, uint64_t) {
      if (name == call) ++*count;
      return absl::OkStatus();
    });
    return count;
  }

  CapturedLog log;
  std::shared_ptr<ForwardingDevice> device;
};

// Creates the device before its engine and destroys it afterwards.
class FaultyWorld : public FaultyDevice, public EngineWorld {
 public:
  explicit FaultyWorld(const EngineOptions& options = {},
                       const EmulatedOptions& machine_options = TestMachineOptions())
      : FaultyWorld(options, *EmulatedMachine::Create(machine_options)) {}

 private:
  FaultyWorld(const EngineOptions& options, const std::shared_ptr<EmulatedMachine>& machine)
      : FaultyDevice(machine->device(0)), EngineWorld(machine, device, options) {}
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_FAULTY_WORLD_H_
