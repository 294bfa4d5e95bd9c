// An engine on a device whose calls can be made to fail, with its log captured.

#ifndef PINION_TESTS_ENGINE_FAULTY_WORLD_H_
#define PINION_TESTS_ENGINE_FAULTY_WORLD_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/forwarding_device.h"

namespace pinion::testing {

inline EngineOptions WithoutRetries() {
  EngineOptions options;
  options.transient_retries = 0;
  return options;
}

struct FaultyWorld {
  explicit FaultyWorld(const EngineOptions& options = {},
                       const EmulatedOptions& machine_options = TestMachineOptions())
      : machine(*EmulatedMachine::Create(machine_options)),
        device(std::make_shared<ForwardingDevice>(machine->device(0))),
        world(machine, device, options) {}

  // Makes the next call of `call` fail once with `status`.
  void FailNext(const std::string& call, absl::Status status) {
    device->FailCalls([call, status, failed = false](const std::string& name, uint64_t) mutable {
      if (failed || name != call) return absl::OkStatus();
      failed = true;
      return status;
    });
  }

  CapturedLog log;
  std::shared_ptr<EmulatedMachine> machine;
  std::shared_ptr<ForwardingDevice> device;
  EngineWorld world;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_FAULTY_WORLD_H_
