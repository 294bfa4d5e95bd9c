// Makes Pinion use the devices of an emulated machine.
//
//   PINION_ASSIGN_OR_RETURN(const auto machine, EmulatedMachine::Create(options));
//   PINION_ASSIGN_OR_RETURN(auto session, OffloadSession::Create({}, EmulatedBackend(machine)));
//
// Thread safety: a backend is a value; its devices are thread-safe.
// Ownership: the backend and each of its devices keep the machine alive.

#ifndef PINION_DEVICE_EMULATED_EMULATED_BACKEND_H_
#define PINION_DEVICE_EMULATED_EMULATED_BACKEND_H_

#include <memory>

#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_machine.h"

namespace pinion {

// Returns a backend with type_name "emu".
DeviceBackend EmulatedBackend(std::shared_ptr<EmulatedMachine> machine);

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_EMULATED_BACKEND_H_
