#include "pinion/hooks/autograd/storage_view.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>

#include <utility>

namespace pinion {

at::Tensor ViewOfStorage(c10::Storage storage, c10::ScalarType type, uint64_t begin_bytes,
                         uint64_t size_bytes) {
  const caffe2::TypeMeta dtype = c10::scalarTypeToTypeMeta(type);
  const c10::DispatchKeySet keys(c10::computeDispatchKey(type, c10::kStrided, storage.device()));
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, dtype);
  const auto elements = [&](uint64_t bytes) {
    return static_cast<int64_t>(bytes / dtype.itemsize());
  };
  const int64_t sizes[] = {elements(size_bytes)};
  const int64_t strides[] = {1};
  impl->set_sizes_and_strides(c10::IntArrayRef(sizes), c10::IntArrayRef(strides),
                              elements(begin_bytes));
  return at::Tensor(std::move(impl));
}

}  // namespace pinion
