#include "pinion/device/emulated/emulated_backend.h"

#include <string>
#include <utility>

#include "absl/status/status.h"

namespace pinion {

DeviceBackend EmulatedBackend(std::shared_ptr<EmulatedMachine> machine) {
  DeviceBackend backend;
  backend.type_name = "emu";
  backend.system = machine.get();
  backend.device = [machine =
                        std::move(machine)](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
    if (machine == nullptr) {
      return absl::InvalidArgumentError(
          "EmulatedBackend was given no machine: make one by EmulatedMachine::Create");
    }
    if (index < 0 || index >= machine->device_count()) {
      return absl::NotFoundError("no device emu:" + std::to_string(index) +
                                 "; the emulated machine has " +
                                 std::to_string(machine->device_count()));
    }
    return machine->device(index);
  };
  return backend;
}

}  // namespace pinion
