// How a program hands its devices to the layers above: explicit, no registry, no static
// constructors.
//
//   auto session = OffloadSession::Create({}, CudaBackend());             // device/cuda
//   auto session = OffloadSession::Create({}, EmulatedBackend(machine));  // device/emulated
//
// Thread safety: `device` may be called from any thread, and is called once per index by a user
// that caches the result.

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
  // NotFound names the index and how many devices there are.
  std::function<absl::StatusOr<std::shared_ptr<Device>>(int index)> device;
  // Tells apart what devices of one type_name belong to: two emulated machines, for example. Users
  // of backends with the same type_name and system share devices, and the first one's `device`.
  const void* system = nullptr;

  // InvalidArgument where `device` is not set.
  absl::Status Validate() const;
  // What `device` returns for the index. InvalidArgument where it is not set, or returns null.
  absl::StatusOr<std::shared_ptr<Device>> Open(int index) const;
};

}  // namespace pinion

#endif  // PINION_DEVICE_DEVICE_BACKEND_H_
