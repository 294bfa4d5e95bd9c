#include "pinion/hooks/activations/saved_view.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>

#include <utility>

namespace pinion {

std::string SavedView::Describe() const {
  return c10::str(c10::typeMetaToScalarType(dtype_), " ", c10::IntArrayRef(sizes_));
}

at::Tensor SavedView::Over(c10::Storage storage, int64_t shift_bytes, c10::DispatchKeySet keys,
                           const c10::VariableVersion* version) const {
  keys = keys.add(
      c10::computeDispatchKey(c10::typeMetaToScalarType(dtype_), c10::kStrided, storage.device()));
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, dtype_);
  impl->set_sizes_and_strides(
      sizes_, strides_, (offset_bytes_ + shift_bytes) / static_cast<int64_t>(dtype_.itemsize()));
  if (version != nullptr) {
    impl->set_version_counter(*version);
  } else if (!impl->version_counter().enabled()) {  // created in inference mode
    impl->set_version_counter(c10::VariableVersion(/*version=*/0));
  }
  return at::Tensor(std::move(impl));
}

}  // namespace pinion
