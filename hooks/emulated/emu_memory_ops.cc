#include "pinion/hooks/emulated/emu_memory_ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "pinion/device/allocation_label.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/emulated/emu_allocator.h"
#include "pinion/hooks/emulated/emu_copy.h"
#include "pinion/hooks/emulated/emu_host_kernel.h"
#include "pinion/hooks/emulated/emu_state.h"

namespace pinion::emu {
namespace {

c10::DeviceIndex IndexFor(std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only tensors of the CPU can be pinned");
  return IndexOf(device.value());
}

at::Tensor EmptyStrided(at::IntArrayRef size, at::IntArrayRef stride,
                        std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                        std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  const AllocationLabel label("aten::empty_strided");
  return MakeDeviceTensor(IndexFor(device, pin_memory), size, stride, c10::dtype_or_default(dtype));
}

at::Tensor Empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  const AllocationLabel label("aten::empty");
  at::Tensor tensor = MakeDeviceTensor(IndexFor(device, pin_memory), {c10::multiply_integers(size)},
                                       {1}, c10::dtype_or_default(dtype));
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  impl->empty_tensor_restride(format.value_or(at::MemoryFormat::Contiguous));
  return tensor;
}

// Zeros without memory, which LibTorch recognises by a dispatch key, as on other devices.
at::Tensor EfficientZeroTensor(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout> /*layout*/,
                               std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  const at::ScalarType type = c10::dtype_or_default(dtype);
  const c10::Device on(kEmu, IndexFor(device, pin_memory));
  at::Tensor zeros = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(),
                   at::detail::computeStorageNbytesContiguous(size, c10::elementSize(type)),
                   c10::DataPtr(nullptr, on)),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) |
          c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
      c10::scalarTypeToTypeMeta(type));
  zeros.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return zeros;
}

const at::Tensor& Resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != size) {
    const size_t needed = at::detail::computeStorageNbytesContiguous(
        size, self.itemsize(), static_cast<size_t>(self.storage_offset()));
    if (needed > self.storage().nbytes()) ResizeStorage(self.storage(), needed);
    impl->set_sizes_contiguous(size);
  }
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& SetStorage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                       at::IntArrayRef stride) {
  const auto first = static_cast<size_t>(offset);
  const size_t needed =
      stride.data() == nullptr
          ? at::detail::computeStorageNbytesContiguous(size, self.itemsize(), first)
          : at::detail::computeStorageNbytes(size, stride, self.itemsize(), first);
  if (needed > source.nbytes()) ResizeStorage(source, needed);
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& SetEmpty(at::Tensor& self) {
  EmuAllocator& allocator = EmuAllocator::Get();
  const c10::Storage empty(c10::Storage::use_byte_size_t(), 0,
                           allocator.AllocateOn(self.device().index(), 0), &allocator,
                           /*resizable=*/true);
  return SetStorage(self, empty, 0, {0}, {});
}

void RecordStream(at::Tensor& self, at::Stream stream) {
  EmuAllocator::Get().recordStream(self.storage().data_ptr(), stream);
}

// True lets parameters keep their identity when a module moves to the device.
bool HasCompatibleShallowCopyType(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == from.layout();
}

}  // namespace

void ResizeStorage(const c10::Storage& storage, size_t size_bytes) {
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "a storage of ", impl->nbytes(), " bytes on ", impl->device(),
              " cannot be resized to ", size_bytes);
  const c10::DeviceIndex index = impl->device().index();
  c10::DataPtr data = EmuAllocator::Get().AllocateOn(index, size_bytes);
  const size_t kept = std::min(size_bytes, impl->nbytes());
  if (kept > 0) {
    ThrowIfError(Machine().Copy(index, data.get(), impl->data(), kept, CurrentHandle(index)),
                 "resizing a storage");
  }
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(size_bytes);
}

void RegisterMemoryOps(torch::Library& library) {
  using at::Tensor;
  library.impl("empty.memory_format", &Empty);
  library.impl("empty_strided", &EmptyStrided);
  library.impl("_efficientzerotensor", &EfficientZeroTensor);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", static_cast<Tensor (*)(const Tensor&, at::IntArrayRef)>(at::native::view));
  library.impl("view.dtype", &at::native::view_dtype);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", static_cast<Tensor (*)(const Tensor&, int64_t, int64_t, int64_t)>(
                             at::native::unfold));
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("set_", &SetEmpty);
  library.impl("set_.source_Storage",
               static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", &SetStorage);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("resize_", &Resize);
  library.impl("_copy_from", &CopyFrom);
  library.impl("record_stream", &RecordStream);
  library.impl("_has_compatible_shallow_copy_type", &HasCompatibleShallowCopyType);
}

}  // namespace pinion::emu
