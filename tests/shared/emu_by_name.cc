// The emulated device for a shared library of the tests: without a GPU no other device could be
// installed. Opening it makes it LibTorch's accelerator.

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/shared/backend_by_name.h"

namespace pinion {

absl::StatusOr<DeviceBackend> BackendByName(const std::string& device_type) {
  if (device_type != "emu") {
    return absl::InvalidArgumentError(
        absl::StrCat("this library has no devices of type \"", device_type, "\"; it has \"emu\""));
  }
  if (RegisteredEmuMachine() == nullptr) {
    EmulatedOptions options;
    options.memory_bytes = 256 * kMiB;
    PINION_ASSIGN_OR_RETURN(std::shared_ptr<EmulatedMachine> machine,
                            EmulatedMachine::Create(options));
    PINION_RETURN_IF_ERROR(RegisterEmuDevice(std::move(machine)));
  }
  return EmulatedBackend(RegisteredEmuMachine());
}

}  // namespace pinion
