#include "pinion/hooks/emulated/emu_host_kernel.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/emulated/emu_allocator.h"
#include "pinion/hooks/emulated/emu_state.h"

namespace pinion::emu {
namespace {

ByteRange RangeOf(const at::Tensor& tensor) {
  const StorageExtent extent = ExtentOf(tensor);
  const char* const base = static_cast<const char*>(tensor.storage().data());
  return {base + extent.begin_bytes, extent.size_bytes()};
}

// Copies host bytes to device memory; the caller has called Prepare().
void Fill(void* device_data, const void* host_data, size_t size_bytes) {
  std::copy_n(static_cast<const char*>(host_data), size_bytes, static_cast<char*>(device_data));
}

ComputeType ComputeTypeOf(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return ComputeType::kFloat64;
    case at::kBFloat16:
    case at::kHalf:
      return ComputeType::kBFloat16;
    default:
      return ComputeType::kFloat32;
  }
}

// Copies the lazy conjugation and negation bits.
void CopyMathBits(const c10::TensorImpl& from, c10::TensorImpl& to) {
  to._set_conj(from.is_conj());
  to._set_neg(from.is_neg());
}

}  // namespace

HostScope::HostScope()
    : excluded_(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                c10::DispatchKeySet(c10::DispatchKey::AutocastCPU)) {}

at::Tensor MakeDeviceTensor(c10::DeviceIndex index, at::IntArrayRef sizes, at::IntArrayRef strides,
                            at::ScalarType type) {
  uint64_t elements = 1;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) {
      elements = 0;
      break;
    }
    elements += static_cast<uint64_t>(sizes[dim] - 1) * static_cast<uint64_t>(strides[dim]);
  }
  const size_t size_bytes = elements * c10::elementSize(type);
  EmuAllocator& allocator = EmuAllocator::Get();
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), size_bytes,
                   allocator.AllocateOn(index, size_bytes), &allocator, /*resizable=*/true),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

double TrafficBytes(const at::Tensor& tensor) {
  const double elements = static_cast<double>(tensor.numel()) * tensor.itemsize();
  return std::min(elements, static_cast<double>(ExtentOf(tensor).size_bytes()));
}

void HostKernel::SetDevice(c10::DeviceIndex index) {
  if (device_ < 0) {
    device_ = index;
    stream_ = CurrentHandle(index);
  }
  TORCH_CHECK(device_ == index, name_,
              " expects all tensors on one device, but found emu:", static_cast<int>(device_),
              " and emu:", static_cast<int>(index));
}

const c10::Storage& HostKernel::HostStorage(const at::Tensor& tensor) {
  c10::StorageImpl* const device = tensor.storage().unsafeGetStorageImpl();
  for (const SharedStorage& shared : storages_) {
    if (shared.device == device) return shared.host;
  }
  void* const data = device->mutable_data();
  // The CPU's allocator lets a kernel resize an out= argument.
  storages_.push_back({device,
                       c10::Storage(c10::Storage::use_byte_size_t(), device->nbytes(),
                                    c10::DataPtr(data, c10::Device(c10::kCPU)),
                                    c10::GetCPUAllocator(), /*resizable=*/true),
                       data});
  return storages_.back().host;
}

at::Tensor HostKernel::Alias(const at::Tensor& tensor, Access access) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  for (Aliased& aliased : aliased_) {
    if (aliased.device.unsafeGetTensorImpl() == impl) {
      if (aliased.access != access) aliased.access = Access::kReadWrite;
      return aliased.host;
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(IsPlainTensor(tensor), name_, ": emu has dense tensors only, not ",
                              tensor.toString());
  SetDevice(tensor.device().index());
  at::Tensor host = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(HostStorage(tensor)), c10::DispatchKeySet(c10::DispatchKey::CPU),
      tensor.dtype());
  c10::TensorImpl* const host_impl = host.unsafeGetTensorImpl();
  host_impl->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
  if (impl->is_wrapped_number()) host_impl->set_wrapped_number(true);
  CopyMathBits(*impl, *host_impl);
  aliased_.push_back({tensor, host, access});
  return host;
}

void HostKernel::Prepare() {
  ThrowIfError(Machine().PrepareKernel(device_, stream_), name_.c_str());
}

at::Tensor HostKernel::Result(const at::Tensor& host) {
  if (!host.defined()) return host;
  for (const Aliased& aliased : aliased_) {
    if (aliased.host.is_same(host)) return aliased.device;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(IsPlainTensor(host), name_,
                              ": emu has dense tensors only, but the result is ", host.toString());
  at::Tensor result = MakeDeviceTensor(device_, host.sizes(), host.strides(), host.scalar_type());
  const ByteRange bytes = RangeOf(host);
  Fill(result.storage().mutable_data(), bytes.data, bytes.size_bytes);
  CopyMathBits(*host.unsafeGetTensorImpl(), *result.unsafeGetTensorImpl());
  results_.push_back(result);
  return result;
}

void HostKernel::UpdateWritten() {
  for (Aliased& aliased : aliased_) {
    if (aliased.access == Access::kRead) continue;
    c10::TensorImpl* const device = aliased.device.unsafeGetTensorImpl();
    const c10::TensorImpl* const host = aliased.host.unsafeGetTensorImpl();
    c10::StorageImpl* const storage = device->unsafe_storage().unsafeGetStorageImpl();
    const c10::Storage& now = aliased.host.storage();
    const bool moved =
        std::none_of(storages_.begin(), storages_.end(),
                     [&](const SharedStorage& shared) { return shared.data == now.data(); });
    if (moved) {
      TORCH_CHECK(storage->resizable(), name_, ": the storage of an out= argument of ",
                  storage->nbytes(), " bytes cannot grow to ", now.nbytes());
      c10::DataPtr grown = EmuAllocator::Get().AllocateOn(device_, now.nbytes());
      Fill(grown.get(), now.data(), now.nbytes());
      storage->set_data_ptr_noswap(std::move(grown));
      storage->set_nbytes(now.nbytes());
    }
    // Only on a change: LibTorch refuses the call for detached tensors.
    if (device->sizes() != host->sizes() || device->strides() != host->strides()) {
      device->set_sizes_and_strides(host->sizes(), host->strides(), host->storage_offset());
    }
    // Kernels conjugate lazily too: a solver transposes its result's strides and sets the bit.
    CopyMathBits(*host, *device);
  }
}

void HostKernel::Launch(double flops, double memory_bytes) {
  Kernel kernel;
  kernel.name = name_;
  kernel.flops = flops;
  if (!aliased_.empty()) kernel.type = ComputeTypeOf(aliased_.front().device.scalar_type());
  kernel.reads.reserve(aliased_.size());
  kernel.writes.reserve(aliased_.size() + results_.size());
  for (const Aliased& aliased : aliased_) {
    const bool read = aliased.access == Access::kRead;
    (read ? kernel.reads : kernel.writes).push_back(RangeOf(aliased.device));
  }
  for (const at::Tensor& result : results_) kernel.writes.push_back(RangeOf(result));
  kernel.memory_bytes = memory_bytes;
  ThrowIfError(Machine().Launch(device_, stream_, kernel), name_.c_str());
}

double HostKernel::memory_bytes() const {
  double bytes = 0;
  for (const Aliased& aliased : aliased_) {
    bytes += TrafficBytes(aliased.device) * (aliased.access == Access::kReadWrite ? 2 : 1);
  }
  for (const at::Tensor& result : results_) bytes += TrafficBytes(result);
  return bytes;
}

void HostKernel::Synchronize() {
  ThrowIfError(DeviceAt(device_).SynchronizeStream(stream_), name_.c_str());
}

}  // namespace pinion::emu
