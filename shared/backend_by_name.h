// Which devices a shared library brings along: each library links a definition of its own.

#ifndef PINION_SHARED_BACKEND_BY_NAME_H_
#define PINION_SHARED_BACKEND_BY_NAME_H_

#include <string>

#include "absl/status/statusor.h"
#include "pinion/device/device_backend.h"

namespace pinion {

// InvalidArgument names the device types that there are.
absl::StatusOr<DeviceBackend> BackendByName(const std::string& device_type);

}  // namespace pinion

#endif  // PINION_SHARED_BACKEND_BY_NAME_H_
