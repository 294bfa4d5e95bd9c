// The devices of a shared library: each library links its own definition.

#ifndef PINION_SHARED_BACKEND_BY_NAME_H_
#define PINION_SHARED_BACKEND_BY_NAME_H_

#include <string>

#include "absl/status/statusor.h"
#include "pinion/device/device_backend.h"

namespace pinion {

// InvalidArgument lists the library's device types.
absl::StatusOr<DeviceBackend> BackendByName(const std::string& device_type);

}  // namespace pinion

#endif  // PINION_SHARED_BACKEND_BY_NAME_H_
