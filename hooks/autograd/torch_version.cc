#include "pinion/hooks/autograd/torch_version.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/headeronly/version.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace pinion {

absl::Status CheckTorchVersion(uint64_t loaded) {
  if (loaded == TORCH_ABI_VERSION) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "Pinion was compiled for LibTorch " TORCH_VERSION ", and runs beside ", loaded >> 56, ".",
      loaded >> 48 & 0xff, ".", loaded >> 40 & 0xff, ": build it with TORCH_PATH naming that one"));
}

absl::Status CheckTorchHas(c10::DeviceType type) {
  try {
    c10::GetAllocator(type);  // throws if there is none
    if (c10::impl::hasDeviceGuardImpl(type)) return absl::OkStatus();
  } catch (const c10::Error&) {
  }
  const std::string name = c10::DeviceTypeName(type, /*lower_case=*/true);
  return absl::FailedPreconditionError(absl::StrCat("LibTorch's part for \"", name,
                                                    "\" is not loaded: link or load libtorch_",
                                                    name, ".so, as docs/users/install.md says"));
}

}  // namespace pinion
