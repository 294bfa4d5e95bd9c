// The border between LibTorch's types and errors and Pinion's.
//
// Device-generic: streams, allocation and cross-stream use go through c10's guard interface, so the
// same code runs on "cuda" and on "emu".
//
// Thread safety: functions of their arguments and of the calling thread's current stream.

#ifndef PINION_HOOKS_AUTOGRAD_TORCH_BRIDGE_H_
#define PINION_HOOKS_AUTOGRAD_TORCH_BRIDGE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/device/device.h"

namespace pinion {

// Throws c10::Error with the status's text, prefixed by `doing` ("fetching a saved tensor").
// ResourceExhausted becomes c10::OutOfMemoryError, which is what LibTorch programs catch.
void ThrowIfError(const absl::Status& status, const char* doing);

// "cuda" and "emu" by name, so that hooks depends on neither. InvalidArgument where LibTorch knows
// no such type of accelerator.
absl::StatusOr<c10::DeviceType> DeviceTypeOf(const std::string& type_name);

// NotFound for a number that LibTorch has no index for.
absl::StatusOr<c10::Device> NumberedDevice(c10::DeviceType type, int number);

c10::Stream CurrentStream(c10::Device device);
StreamHandle NativeStream(const c10::Stream& stream);

// A stream with its native handle, which LibTorch may throw when it is asked for: destructors and
// holders of a mutex have no need to.
struct BoundStream {
  explicit BoundStream(const c10::Stream& stream) : torch(stream), native(NativeStream(stream)) {}

  c10::Stream torch;
  StreamHandle native;
};

// Uninitialised device memory on `stream`. Throws c10::OutOfMemoryError, as LibTorch's allocators
// do.
c10::Storage AllocateStorage(const c10::Stream& stream, uint64_t size_bytes);

// What LibTorch's allocator of the device has given out. Its type's allocator has to tell
// (TellsAllocatedBytes).
struct AllocatorBytes {
  int64_t current = 0;
  int64_t peak = 0;       // since the user has reset it
  int64_t allocated = 0;  // from the start, whatever was freed since
  int64_t refusals = 0;   // from the start: it had no room
  // How often something was freed, from the start or since the user has reset it; nothing where the
  // allocator does not count that.
  std::optional<int64_t> frees = std::nullopt;
};
AllocatorBytes AllocatorBytesOf(c10::Device device);
int64_t AllocatedBytes(c10::Device device);
bool TellsAllocatedBytes(c10::DeviceType type);
// How often the device's allocator had to give its cache back, for which the host waits, before it
// could allocate; 0 where it does not tell.
int64_t AllocationRetries(c10::Device device);

// Tells the framework that `stream` uses the storage too (tensor.record_stream).
void RecordOnStream(const c10::Storage& storage, const c10::Stream& stream);
// The same. False where it fails: the next call to the device does for the same reason.
bool TryRecordOnStream(const c10::Storage& storage, const c10::Stream& stream);

// The bytes [begin, end) of its storage that a strided tensor can touch.
struct StorageExtent {
  uint64_t begin_bytes = 0;
  uint64_t end_bytes = 0;
  uint64_t size_bytes() const { return end_bytes - begin_bytes; }
  bool Contains(const StorageExtent& other) const {
    return begin_bytes <= other.begin_bytes && other.end_bytes <= end_bytes;
  }
};
StorageExtent ExtentOf(const at::Tensor& tensor);

// Whether a TensorImpl over a storage is all that the tensor is, so that another TensorImpl can
// stand for it. Wrappers are not plain (functorch's, functionalization's, Python's subclasses with
// __torch_dispatch__, fake tensors), nor are nested, sparse and quantized tensors: they copy
// themselves in ways of their own.
bool IsPlainTensor(const at::TensorBase& tensor);

// A TensorImpl of Pinion's that is copied in another way than LibTorch's, and else the same: its
// tensors are plain.
class PlainTensorImpl : public c10::TensorImpl {
 public:
  using TensorImpl::TensorImpl;
};

// A copy of the tensor's handle without its autograd history; storage and version counter are
// shared. Does not dispatch, unless Python wraps the tensor.
at::Tensor DetachedAlias(const at::Tensor& tensor);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_TORCH_BRIDGE_H_
