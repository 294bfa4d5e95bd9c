#include "pinion/hooks/weights/shown_gradient.h"

#include <ATen/core/function_schema.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include "pinion/hooks/weights/host_gradients.h"

namespace pinion {

at::Tensor ShownGradient::Tensor(const at::Tensor& master, c10::ScalarType type,
                                 c10::Device device) {
  like_ = at::empty_like(master, at::TensorOptions(at::kMeta).dtype(type));
  device_ = device;
  c10::Storage storage(c10::Storage::use_byte_size_t(), like_.storage().nbytes(),
                       c10::DataPtr(nullptr, device), c10::GetAllocator(device.type()),
                       /*resizable=*/false);
  MakeStreamed(storage, shared_from_this(), 0);
  storage_ = storage.getWeakStorageImpl();
  return MakeStreamedTensor(like_, 0, std::move(storage));
}

std::shared_ptr<HostGradients> ShownGradient::Owner() const {
  std::shared_ptr<HostGradients> owner = gradients_.lock();
  TORCH_CHECK(owner != nullptr,
              "a gradient of streamed weights is used after the model and its "
              "WeightOffloader have gone");
  TORCH_CHECK(owner->Shows(index_, *this), "the gradient of ", owner->NameOf(index_),
              " that is used was forgotten since it was taken from grad(), by zero_grad() or by "
              "another gradient: take it anew, or keep a clone()");
  return owner;
}

at::Tensor ShownGradient::Value() const {
  const std::shared_ptr<HostGradients> owner = Owner();
  at::Tensor value = owner->Value(index_);
  TORCH_CHECK(value.defined(), "the gradient of ", owner->NameOf(index_),
              " is used, and zero_grad() of host_parameters() has forgotten it");
  return value;
}

void ShownGradient::Enter(uint32_t, uint64_t) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const at::Tensor value = Value();
  TORCH_CHECK(!here_.defined(),
              "two threads use a gradient of streamed weights at once: clone() "
              "it for one of them");
  at::Tensor here = at::empty_like(like_, like_.options().device(*device_));
  here.copy_(value);
  here_ = std::move(here);
  if (const auto storage = storage_.lock()) {
    storage->set_data_ptr_noswap(
        StreamedData(here_.mutable_data_ptr(), shared_from_this(), *device_));
  }
}

void ShownGradient::Leave(uint32_t) {
  if (const auto storage = storage_.lock()) {
    storage->set_data_ptr_noswap(StreamedData(nullptr, shared_from_this(), *device_));
  }
  here_.reset();
}

bool ShownGradient::Write(uint32_t, const WritingOperator& op) {
  const at::Tensor& written = op.written;
  const std::shared_ptr<HostGradients> owner = Owner();
  const bool is_whole = written.sizes() == like_.sizes() && written.strides() == like_.strides() &&
                        written.dtype() == like_.dtype() && !written.requires_grad();
  if (!is_whole) return false;
  if (op.schema.name() == "aten::zero_") {
    owner->Zero(index_);
  } else if (op.schema.name() == "aten::add_" && op.schema.overload_name() == "Tensor" &&
             !device_->is_cpu()) {
    const at::Tensor& added = op.arguments[1].toTensor();
    const bool is_gradient = added.sizes() == written.sizes() && added.dtype() == written.dtype() &&
                             !IsStreamed(added) && added.device() == *device_ &&
                             !added.requires_grad() && op.arguments[2].toScalar().equal(1);
    if (!is_gradient) return false;
    // Backward and the arguments hold one reference each. Another owner may change the tensor.
    const bool is_shared = !owner->IsAccumulating(index_) || added.use_count() > 2;
    const at::NoGradGuard no_grad;
    owner->Add(index_, is_shared ? added.clone() : added);
  } else {
    return false;
  }
  written.unsafeGetTensorImpl()->bump_version();
  return true;
}

void ShownGradient::OnWritten(uint32_t) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  Value().copy_(here_);
}

}  // namespace pinion
