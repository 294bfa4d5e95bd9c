// Converts between LibTorch's and Pinion's types and errors.
//
// Streams and allocation go through c10's device-generic interfaces, so the same code runs on
// "cuda" and "emu".
//
// Thread safety: thread-safe; some functions use the calling thread's current stream.

#ifndef PINION_HOOKS_AUTOGRAD_TORCH_BRIDGE_H_
#define PINION_HOOKS_AUTOGRAD_TORCH_BRIDGE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"

namespace pinion {

// Throws c10::Error if `status` is an error; `doing` ("fetching a saved tensor") begins the text.
// ResourceExhausted becomes c10::OutOfMemoryError, which LibTorch programs catch.
void ThrowIfError(const absl::Status& status, const char* doing);

// Returns the type that has a name such as "cuda" or "emu". InvalidArgument if LibTorch knows no
// accelerator of that name.
absl::StatusOr<c10::DeviceType> DeviceTypeOf(const std::string& type_name);

// Returns the device. NotFound if LibTorch cannot represent the number.
absl::StatusOr<c10::Device> NumberedDevice(c10::DeviceType type, int number);

// Checks that the LibTorch that is loaded is the release that Pinion was compiled with: classes of
// another one would have another layout. `loaded` is aoti_torch_abi_version(). FailedPrecondition
// names both releases.
absl::Status CheckTorchVersion(uint64_t loaded);

// Returns FailedPrecondition if the library with LibTorch's guard and allocator of this device type
// is not loaded. Most of LibTorch's functions for the type throw then.
absl::Status CheckTorchHas(c10::DeviceType type);

// Returns InvalidArgument if LibTorch's devices are of another emulated machine than the backend's,
// where tensors would stay, because the backend does not know their memory and streams. Returns OK
// if the backend cannot open a device: later calls return its error. Requires CheckTorchHas(type).
absl::Status CheckIsRegistered(const DeviceBackend& backend, c10::DeviceType type);

c10::Stream CurrentStream(c10::Device device);
StreamHandle NativeStream(const c10::Stream& stream);

// A stream with its native handle. LibTorch may throw when the handle is requested, which
// destructors and code under a mutex must avoid.
struct BoundStream {
  explicit BoundStream(const c10::Stream& stream) : torch(stream), native(NativeStream(stream)) {}

  c10::Stream torch;
  StreamHandle native;
};

// Returns uninitialised device memory on `stream`. Throws c10::OutOfMemoryError.
c10::Storage AllocateStorage(const c10::Stream& stream, uint64_t size_bytes);

// Bytes and counters of the device's LibTorch allocator. All but `current` start anew when the user
// resets the statistics. Requires TellsAllocatedBytes(type).
struct AllocatorBytes {
  int64_t current = 0;
  int64_t peak = 0;
  int64_t allocated = 0;  // total of all allocations, freed or not
  // Number of frees. Nothing if the allocator does not count them.
  std::optional<int64_t> frees = std::nullopt;
  // Of these, what streamed weights have and have allocated. Set by the caller.
  int64_t streamed = 0;
  int64_t streamed_allocated = 0;
};
AllocatorBytes AllocatorBytesOf(c10::Device device);

// What MemoryObserver::OnDeviceBytes reported between two moments.
struct Reported {
  int64_t peak_bytes = 0;   // at least what the first moment had
  int64_t added_bytes = 0;  // total of the allocations
};
// Returns an upper bound of the bytes between two moments: the reported peak plus all allocations
// that were not reported, at most the allocator's peak.
int64_t MostBytesBetween(AllocatorBytes begin, AllocatorBytes end, const Reported& reported);
// The same of memory without streamed weights. `reported.peak_bytes` leaves them out, too.
int64_t MostBytesBesideStreamed(const AllocatorBytes& begin, const AllocatorBytes& end,
                                const Reported& reported);
int64_t AllocatedBytes(c10::Device device);
bool TellsAllocatedBytes(c10::DeviceType type);
// Returns how often the allocator emptied its cache, which blocks the host, to serve an allocation.
// Returns 0 if the allocator does not count that.
int64_t AllocationRetries(c10::Device device);

// Records that `stream` uses the storage too (tensor.record_stream).
void RecordOnStream(const c10::Storage& storage, const c10::Stream& stream);
// Like RecordOnStream, but returns false on failure. The next device call fails for the same
// reason.
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

// Returns the `size_bytes` bytes from `begin_bytes` as a vector of `type`. Both must be multiples
// of the type's size. The tensor shares the storage and has no history.
at::Tensor ViewOfStorage(c10::Storage storage, c10::ScalarType type, uint64_t begin_bytes,
                         uint64_t size_bytes);

// Returns whether the tensor is no more than a TensorImpl over a storage, so that another
// TensorImpl can replace it. Nested, sparse and quantized tensors and wrappers (functorch,
// functionalization, __torch_dispatch__ subclasses, fake tensors) are not plain.
bool IsPlainTensor(const at::TensorBase& tensor);

// Base of Pinion's own TensorImpls, whose tensors count as plain although they copy differently.
class PlainTensorImpl : public c10::TensorImpl {
 public:
  using TensorImpl::TensorImpl;
};

// Returns a handle that shares storage and version counter but has no autograd history. Does not
// dispatch, unless Python wraps the tensor.
at::Tensor DetachedAlias(const at::Tensor& tensor);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_TORCH_BRIDGE_H_
