#include "pinion/hooks/autograd/torch_version.h"

#include <torch/headeronly/version.h>

#include "absl/strings/str_cat.h"

namespace pinion {

absl::Status CheckTorchVersion(uint64_t loaded) {
  if (loaded == TORCH_ABI_VERSION) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "Pinion was compiled for LibTorch " TORCH_VERSION ", and runs beside ", loaded >> 56, ".",
      loaded >> 48 & 0xff, ".", loaded >> 40 & 0xff, ": build it with TORCH_PATH naming that one"));
}

}  // namespace pinion
