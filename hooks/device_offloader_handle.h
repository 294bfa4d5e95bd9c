// What stands in for one saved tensor in the graph. Part of DeviceOffloader's implementation.

#ifndef PINION_HOOKS_DEVICE_OFFLOADER_HANDLE_H_
#define PINION_HOOKS_DEVICE_OFFLOADER_HANDLE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "pinion/hooks/device_offloader.h"
#include "pinion/hooks/saved_tensor_hooks.h"
#include "pinion/hooks/saved_version.h"

namespace pinion {

class DeviceOffloader::Handle : public SavedTensor {
 public:
  Handle(std::shared_ptr<DeviceOffloader> owner, RecordPtr record, const at::Tensor& tensor)
      : owner_(std::move(owner)),
        record_(std::move(record)),
        version_(tensor),
        sizes_(tensor.sizes()),
        strides_(tensor.strides()),
        offset_bytes_(tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize())),
        dtype_(tensor.dtype()) {}

  ~Handle() override { owner_->Release(*this); }

  at::Tensor Unpack() override {
    version_.Check([this] { return Describe(); });
    return owner_->Unpack(*this);
  }

  const RecordPtr& record() const { return record_; }

  // For messages: "Float [16, 32]".
  std::string Describe() const {
    return c10::str(c10::typeMetaToScalarType(dtype_), " ", c10::IntArrayRef(sizes_));
  }

  at::Tensor View(Bytes bytes, const c10::VariableVersion& version) const {
    const c10::Device device = bytes.storage.device();
    const c10::DispatchKeySet keys(
        c10::computeDispatchKey(c10::typeMetaToScalarType(dtype_), c10::kStrided, device));
    auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(bytes.storage), keys, dtype_);
    impl->set_sizes_and_strides(
        sizes_, strides_,
        (offset_bytes_ + bytes.shift_bytes) / static_cast<int64_t>(dtype_.itemsize()));
    impl->set_version_counter(version);
    return at::Tensor(std::move(impl));
  }

  uint64_t read_epoch = 0;  // of the record's parcel; guarded by the owner's mutex

 private:
  const std::shared_ptr<DeviceOffloader> owner_;
  const RecordPtr record_;
  const SavedVersion version_;
  const c10::SmallVector<int64_t, 5> sizes_;
  const c10::SmallVector<int64_t, 5> strides_;
  const int64_t offset_bytes_;
  const caffe2::TypeMeta dtype_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_DEVICE_OFFLOADER_HANDLE_H_
