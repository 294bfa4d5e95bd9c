#include "pinion/hooks/autograd/torch_bridge.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>

#include "absl/strings/str_cat.h"

namespace pinion {
namespace {

// LibTorch determines in each call whether its allocator is a device's, which takes as long as
// reading the statistics.
c10::DeviceAllocator& DeviceAllocatorOf(c10::DeviceType type) {
  static std::atomic<c10::DeviceAllocator*> last = nullptr;
  c10::DeviceAllocator* allocator = last.load(std::memory_order_relaxed);
  if (allocator == nullptr || allocator != c10::GetAllocator(type)) {
    allocator = c10::getDeviceAllocator(type);
    last.store(allocator, std::memory_order_relaxed);
  }
  return *allocator;
}

}  // namespace

void ThrowIfError(const absl::Status& status, const char* doing) {
  if (status.ok()) return;
  const std::string text = "Pinion, while " + std::string(doing) + ": " + status.ToString();
  TORCH_CHECK_WITH(OutOfMemoryError, !absl::IsResourceExhausted(status), text);
  TORCH_CHECK(false, text);
}

absl::StatusOr<c10::Device> NumberedDevice(c10::DeviceType type, int number) {
  const auto index = static_cast<c10::DeviceIndex>(number);
  if (index == number && index >= 0) return c10::Device(type, index);
  return absl::NotFoundError(
      absl::StrCat("there is no device ", c10::DeviceTypeName(type, /*lower_case=*/true), ":",
                   number, ": devices are numbered from 0, and LibTorch has at most 128"));
}

absl::StatusOr<c10::DeviceType> DeviceTypeOf(const std::string& type_name) {
  try {
    const c10::Device device(type_name);
    if (!device.has_index() && at::accelerator::isAccelerator(device.type())) return device.type();
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", type_name, "\" is no type of accelerator: name the type alone, as \"cuda\""));
  } catch (const c10::Error& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("LibTorch knows no device type \"", type_name,
                     "\" (is the emulated device registered?): ", error.what_without_backtrace()));
  }
}

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

absl::Status CheckIsRegistered(const DeviceBackend& backend, c10::DeviceType type) {
  if (backend.type_name != "emu") return absl::OkStatus();
  const absl::StatusOr<std::shared_ptr<Device>> device = backend.Open(0);
  if (!device.ok()) return absl::OkStatus();
  const c10::Stream stream(c10::Stream::DEFAULT, c10::Device(type, 0));
  const absl::Status known = (*device)->IsCapturing(NativeStream(stream)).status();
  if (!absl::IsInvalidArgument(known)) return absl::OkStatus();  // other errors show in later calls
  return absl::InvalidArgumentError(absl::StrCat(
      "the backend is of another machine than LibTorch's \"", backend.type_name,
      "\": register this machine (RegisterEmuDevice), or make the backend of the registered one (",
      known.message(), ")"));
}

c10::Stream CurrentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

StreamHandle NativeStream(const c10::Stream& stream) {
  return StreamHandle(stream.native_handle());
}

c10::Storage AllocateStorage(const c10::Stream& stream, uint64_t size_bytes) {
  const c10::StreamGuard guard(stream);
  c10::Allocator* allocator = c10::GetAllocator(stream.device_type());
  return c10::Storage(c10::Storage::use_byte_size_t(), size_bytes, allocator->allocate(size_bytes),
                      allocator, /*resizable=*/false);
}

AllocatorBytes AllocatorBytesOf(c10::Device device) {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const c10::CachingDeviceAllocator::DeviceStats stats =
      DeviceAllocatorOf(device.type()).getDeviceStats(device.index());
  const c10::CachingAllocator::Stat& bytes = stats.allocated_bytes[kAll];
  const c10::CachingAllocator::Stat& blocks = stats.allocation[kAll];
  AllocatorBytes all = {.current = bytes.current, .peak = bytes.peak, .allocated = bytes.allocated};
  // Some allocators count only current bytes.
  if (blocks.allocated > 0) all.frees = blocks.freed;
  return all;
}

int64_t MostBytesBetween(AllocatorBytes begin, AllocatorBytes end, const Reported& reported) {
  begin.streamed = begin.streamed_allocated = end.streamed = end.streamed_allocated = 0;
  return MostBytesBesideStreamed(begin, end, reported);
}

int64_t MostBytesBesideStreamed(const AllocatorBytes& begin, const AllocatorBytes& end,
                                const Reported& reported) {
  const int64_t fetched_bytes = end.streamed_allocated - begin.streamed_allocated;
  const int64_t unreported_bytes =
      std::max<int64_t>(end.allocated - begin.allocated - reported.added_bytes, 0);
  const int64_t unreported_weights =
      std::clamp<int64_t>(fetched_bytes - reported.added_bytes, 0, unreported_bytes);
  const int64_t most_bytes = reported.peak_bytes + unreported_bytes - unreported_weights;
  // A lower peak at the end means that the user has reset it.
  if (end.peak < begin.peak) return most_bytes;
  // Weights that were fetched since may have come after the peak.
  const int64_t peak_bytes = end.peak - std::max<int64_t>(end.streamed - fetched_bytes, 0);
  // Some allocators do not count all allocations: for them, only a new peak tells of unreported
  // ones.
  const int64_t counted_bytes =
      reported.peak_bytes + unreported_bytes + begin.streamed + fetched_bytes;
  const bool is_counted = end.peak == begin.peak || end.peak <= counted_bytes;
  return std::max(reported.peak_bytes, is_counted ? std::min(most_bytes, peak_bytes) : peak_bytes);
}

int64_t AllocatedBytes(c10::Device device) { return AllocatorBytesOf(device).current; }

bool TellsAllocatedBytes(c10::DeviceType type) {
  return dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(type)) != nullptr;
}

int64_t AllocationRetries(c10::Device device) {
  if (!TellsAllocatedBytes(device.type())) return 0;
  return DeviceAllocatorOf(device.type()).getDeviceStats(device.index()).num_alloc_retries;
}

void RecordOnStream(const c10::Storage& storage, const c10::Stream& stream) {
  c10::impl::VirtualGuardImpl(stream.device_type())
      .recordDataPtrOnStream(storage.data_ptr(), stream);
}

bool TryRecordOnStream(const c10::Storage& storage, const c10::Stream& stream) {
  try {
    RecordOnStream(storage, stream);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

StorageExtent ExtentOf(const at::Tensor& tensor) {
  const uint64_t item_bytes = tensor.itemsize();
  const uint64_t begin = static_cast<uint64_t>(tensor.storage_offset()) * item_bytes;
  if (tensor.numel() == 0) return {begin, begin};
  uint64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += static_cast<uint64_t>(tensor.size(dim) - 1) * static_cast<uint64_t>(tensor.stride(dim));
  }
  return {begin, begin + (last + 1) * item_bytes};
}

bool IsPlainTensor(const at::TensorBase& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const bool is_plain_impl = typeid(impl) == typeid(c10::TensorImpl) ||
                             dynamic_cast<const PlainTensorImpl*>(&impl) != nullptr;
  // Fake tensors of C++ are TensorImpls whose storage has no memory.
  constexpr c10::DispatchKeySet kWrappers({c10::DispatchKey::Python, c10::DispatchKey::Fake});
  return is_plain_impl && impl.has_storage() && !impl.key_set().has_any(kWrappers);
}

at::Tensor DetachedAlias(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                  /*allow_tensor_metadata_change=*/false));
}

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
