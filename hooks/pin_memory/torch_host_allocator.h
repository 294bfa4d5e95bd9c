// Pinion's allocator in the place of LibTorch's own: behind pin_memory(), pinned tensors and
// DataLoaders.
//
//   PINION_RETURN_IF_ERROR(InstallTorchHostAllocator({}, CudaBackend()));
//   torch::Tensor batch = images.pin_memory();   // from Pinion's segments from now on
//
// LibTorch's host cache rounds to powers of two, pins block by block, has no limit and gives
// nothing back. This one books at most 12.5 % more than is asked for, from 2 KiB on, pins in
// segments, and keeps to a budget for the host's RAM: beyond it, pin_memory() throws
// c10::OutOfMemoryError with the text of PinnedAllocator::Allocate.
//
// A block that copies still use (record_event, which LibTorch calls for every non-blocking copy) is
// reused once each of their streams has got to the point at which the block was freed. One that was
// allocated or copied while its stream captured a graph is never reused: the copies run again with
// each replay. Neither is one whose device cannot say how far it is.
//
// LibTorch's own statistics and empty_cache() work: at::getHostAllocator(type), and in Python
// torch.cuda.host_memory_stats(), reset_peak_host_memory_stats() and the like. "Active" is what
// LibTorch holds, "allocated" the segments.
//
// Thread safety: installing is for one thread, before others use pinned memory of the type; the
// allocator itself is thread-safe.
// Ownership: it stays for the life of the process, as LibTorch demands, and so do the backend's
// devices that it has used. Memory that was pinned before belongs to the allocator that pinned it.
// Fork, exit: a child of fork() cannot pin nor read statistics (c10::Error, FailedPrecondition),
// and may drop what it inherits. While the process exits, nothing is given back.

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

// For the backend's device type. AlreadyExists the second time; InvalidArgument for bad options or
// a device type that LibTorch does not know; FailedPrecondition beside another release of LibTorch
// than it was compiled for, or where a session lives that was made with other AllocatorOptions,
// with which it would share its pool (engine/tier/host_tier.h); the backend's own error if it has
// no device. With PINION_DISABLE=1 in the environment LibTorch's own allocator stays: OK, and a
// line in the log.
absl::Status InstallTorchHostAllocator(const AllocatorOptions& options,
                                       const DeviceBackend& backend);

// Of the one that is installed for "cuda", "emu", ...; NotFound if there is none.
absl::StatusOr<AllocatorStats> TorchHostAllocatorStats(const std::string& device_type);

// What LibTorch's own statistics say of it, under the names of torch.cuda.host_memory_stats():
// "active_bytes.current", "host_alloc_time.total" (microseconds), ... Errors as above.
absl::StatusOr<std::map<std::string, int64_t>> TorchHostMemoryStats(const std::string& device_type);

}  // namespace pinion

#endif  // PINION_HOOKS_PIN_MEMORY_TORCH_HOST_ALLOCATOR_H_
