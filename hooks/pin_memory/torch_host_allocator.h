// Replaces LibTorch's pinned-memory allocator, behind pin_memory(), pinned tensors and DataLoaders.
//
//   PINION_RETURN_IF_ERROR(InstallTorchHostAllocator({}, CudaBackend()));
//   torch::Tensor batch = images.pin_memory();   // allocated by Pinion
//
// LibTorch's host cache rounds up to powers of two, pins block by block, has no limit, and never
// shrinks. Pinion's allocator rounds up by at most 12.5 % (from 2 KiB on), pins in segments, and
// has a budget of host RAM. Beyond the budget pin_memory() throws c10::OutOfMemoryError with the
// text of PinnedAllocator::Allocate.
//
// A freed block is reused when every stream that copied it (record_event, which LibTorch calls for
// each non-blocking copy) has passed the point of the free. Exception: a block is never reused if
// it was allocated or copied during a graph capture, because each replay repeats the copies, or if
// its device cannot report progress.
//
// LibTorch's statistics and empty_cache() work: at::getHostAllocator(type), and in Python
// torch.cuda.host_memory_stats() and reset_peak_host_memory_stats(). "Active" counts blocks in use,
// "allocated" counts segments.
//
// Thread safety: install on one thread before others use pinned memory of the type. The allocator
// itself is thread-safe.
// Ownership: the allocator and the devices that it has used live until the process exits. Memory
// that was pinned earlier stays with the allocator that pinned it.
// Fork, exit: a child of fork() cannot pin or read statistics (c10::Error, FailedPrecondition). It
// may release inherited tensors. Nothing is freed while the process exits.

#ifndef PINION_HOOKS_PIN_MEMORY_TORCH_HOST_ALLOCATOR_H_
#define PINION_HOOKS_PIN_MEMORY_TORCH_HOST_ALLOCATOR_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/device/device_backend.h"

namespace pinion {

// Installs the allocator for the backend's device type. With PINION_DISABLE=1 in the environment it
// logs a line and returns OK without installing. Errors:
//   AlreadyExists: one is installed for the type.
//   InvalidArgument: bad options, or LibTorch does not know the device type.
//   FailedPrecondition: another release of LibTorch is loaded, or a living session with other
//     AllocatorOptions uses the process's pool (engine/tier/host_tier.h).
//   The backend's own error if it has no device.
absl::Status InstallTorchHostAllocator(const AllocatorOptions& options,
                                       const DeviceBackend& backend);

// Returns Pinion's statistics of the allocator installed for "cuda", "emu", ... NotFound without
// one. FailedPrecondition in a child of fork().
absl::StatusOr<AllocatorStats> TorchHostAllocatorStats(const std::string& device_type);

// Returns LibTorch's statistics under the names of torch.cuda.host_memory_stats():
// "active_bytes.current", "host_alloc_time.total" (microseconds), ... Errors as above.
absl::StatusOr<std::map<std::string, int64_t>> TorchHostMemoryStats(const std::string& device_type);

}  // namespace pinion

#endif  // PINION_HOOKS_PIN_MEMORY_TORCH_HOST_ALLOCATOR_H_
