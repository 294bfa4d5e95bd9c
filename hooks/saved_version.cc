#include "pinion/hooks/saved_version.h"

#include <c10/util/Exception.h>

#include <cstring>

namespace pinion {
namespace {

// Which counter it is. LibTorch has no accessor for it; a VariableVersion is one pointer.
const void* IdentityOf(const c10::VariableVersion& counter) {
  static_assert(sizeof(counter) == sizeof(void*));
  const void* identity = nullptr;
  std::memcpy(&identity, &counter, sizeof(identity));
  return identity;
}

}  // namespace

SavedVersion::SavedVersion(const at::Tensor& tensor)
    : counter_(tensor.unsafeGetTensorImpl()->version_counter()),
      saved_(counter_.enabled() ? counter_.current_version() : 0) {}

bool operator==(const SavedVersion& a, const SavedVersion& b) {
  return IdentityOf(a.counter_) == IdentityOf(b.counter_) && a.saved_ == b.saved_;
}

void SavedVersion::Check(absl::FunctionRef<std::string()> describe) const {
  if (!counter_.enabled()) return;
  const uint32_t version = counter_.current_version();
  if (version == saved_) return;
  TORCH_CHECK(false,
              "one of the variables needed for gradient computation has been modified by an "
              "inplace operation: [",
              describe(), "] is at version ", version, "; expected version ", saved_,
              " instead. Clone it before changing it in place. Hint: anomaly detection, "
              "torch::autograd::AnomalyMode::set_enabled(true), shows the forward of the operator "
              "that failed to compute its gradient.");
}

}  // namespace pinion
