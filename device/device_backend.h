// Tells Pinion which devices to use: a function from device index to Device. No registry, no static
// constructors.
//
//   auto session = OffloadSession::Create({}, CudaBackend());             // device/cuda
//   auto session = OffloadSession::Create({}, EmulatedBackend(machine));  // device/emulated
//
// Thread safety: `device` may be called from any thread. Callers cache its result per index.

#ifndef PINION_DEVICE_DEVICE_BACKEND_H_
#define PINION_DEVICE_DEVICE_BACKEND_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/device/device.h"

namespace pinion {

struct DeviceBackend {
  std::string type_name;  // as LibTorch prints it: "cuda", "emu"
  // Returns the device of an index. NotFound names the index and the number of devices.
  std::function<absl::StatusOr<std::shared_ptr<Device>>(int index)> device;
  // Identity of the devices' system, for example one of two emulated machines. Backends with equal
  // type_name and system share devices, and use the first backend's `device` function.
  const void* system = nullptr;

  // Returns InvalidArgument if `device` is not set.
  absl::Status Validate() const;
  // Returns the device of `index`. InvalidArgument if `device` is not set, or returns null.
  absl::StatusOr<std::shared_ptr<Device>> Open(int index) const;
};

}  // namespace pinion

#endif  // PINION_DEVICE_DEVICE_BACKEND_H_
