#include "pinion/hooks/autograd/saved_version.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <string>
#include <string_view>
#include <typeinfo>

namespace pinion {
namespace {

// LibTorch has no accessor for a counter's identity; a VariableVersion is one pointer.
const void* IdentityOf(const c10::VariableVersion& counter) {
  static_assert(sizeof(counter) == sizeof(void*));
  const void* identity = nullptr;
  std::memcpy(&identity, &counter, sizeof(identity));
  return identity;
}

// Returns "ExpBackward0", as Node::name() does.
std::string NameOf(const std::type_info& node) {
  constexpr std::string_view kGenerated = "torch::autograd::generated::";
  std::string name = c10::demangle(node.name());
  if (name.starts_with(kGenerated)) name.erase(0, kGenerated.size());
  return name;
}

}  // namespace

SavedVersion::SavedVersion(const at::Tensor& tensor)
    : counter_(tensor.unsafeGetTensorImpl()->version_counter()),
      saved_(counter_.enabled() ? counter_.current_version() : 0) {
  if (const torch::autograd::Node* const node = torch::autograd::impl::grad_fn_unsafe(tensor)) {
    producer_ = &typeid(*node);
    output_ = torch::autograd::impl::get_autograd_meta(tensor)->output_nr_;
  }
}

bool operator==(const SavedVersion& a, const SavedVersion& b) {
  return IdentityOf(a.counter_) == IdentityOf(b.counter_) && a.saved_ == b.saved_;
}

void SavedVersion::Check(absl::FunctionRef<std::string()> describe) const {
  if (!counter_.enabled() || counter_.current_version() == saved_) return;
  std::string made_by;
  if (producer_ != nullptr) {
    made_by = c10::str(", which is output ", output_, " of ", NameOf(*producer_), ",");
  }
  TORCH_CHECK(false,
              "one of the variables needed for gradient computation has been modified by an "
              "inplace operation: [",
              describe(), "]", made_by, " is at version ", counter_.current_version(),
              "; expected version ", saved_, " instead. Clone it before changing it in place.",
              torch::autograd::AnomalyMode::is_enabled()
                  ? ""
                  : " Hint: with torch.autograd.set_detect_anomaly(True) Python shows the forward "
                    "call of the operator whose backward needs it.");
}

}  // namespace pinion
