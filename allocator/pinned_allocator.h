// A caching allocator of page-locked ("pinned") host memory under a budget for the host's RAM.
//
//   PINION_ASSIGN_OR_RETURN(std::shared_ptr<PinnedAllocator> allocator,
//                           PinnedAllocator::Create({}, std::move(source)));
//   PINION_ASSIGN_OR_RETURN(PinnedBlock block, allocator->Allocate(5 * kMiB));
//
// Pinning costs 0.1 to 1 s per GiB and may stall every process that uses the driver. So the
// allocator pins large segments and keeps them. The first segment has 64 MiB, for programs that
// need little. Blocks are cut from segments by segregated fit, and coalesced when they are freed.
// Rounding adds at most 12.5 % by default, or less than 256 bytes below 2 KiB.
//
//   segment  |--used--|-free-|--used--|---------free---------|
//                        \______________/ buckets by size: first fit is best fit within 12.5 %
//
// Thread safety: thread-safe. With a lock held, the allocator calls only JoinsAt of the source and
// Completed of timelines. The only system calls are those that locks and heaps make: futex(2),
// mmap(2), sched_yield(2), and for memory of other threads membarrier(2) and nanosleep(2). One
// thread grows at a time; other threads that need to grow wait.
//
// Ownership: blocks may outlive the allocator. Their memory is freed with the last block.
//
// C++ heap: if it is full, a release still works (ReleaseAfter may wait), and other calls throw
// std::bad_alloc and lose nothing. Exception: the process ends if the heap fails while memory moves
// between threads, is added or is freed. That includes the end of the allocator and of its last
// block.
//
// Fork: a child of fork() may destroy inherited objects, which does nothing. Other calls return
// FailedPrecondition, empty statistics, or false for Owns.

#ifndef PINION_ALLOCATOR_PINNED_ALLOCATOR_H_
#define PINION_ALLOCATOR_PINNED_ALLOCATOR_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/ram/host_ram.h"

namespace pinion {

class PinnedAllocator {
 public:
  // Errors: InvalidArgument, with the field, for bad options, a null source, or an impossible
  // granularity. With a ledger_directory also Unavailable if its file cannot be used, and
  // PermissionDenied if it is another user's. `ram` is this host, whose budget all Pinion processes
  // of the user share. Tests inject fixtures.
  static absl::StatusOr<std::shared_ptr<PinnedAllocator>> Create(
      const AllocatorOptions& options, std::shared_ptr<HostMemorySource> source,
      HostRam ram = HostRam());

  ~PinnedAllocator();
  PinnedAllocator(const PinnedAllocator&) = delete;
  PinnedAllocator& operator=(const PinnedAllocator&) = delete;

  // Returns a block of at least `size_bytes`. From 32 KiB on it is aligned to alignment_bytes,
  // below to --//config:min_block_bytes (256).
  //
  // Errors: InvalidArgument for 0 and above 2^47. ResourceExhausted if the budget or the source
  // refuses and no cached block fits; the message has the request, the locked bytes, and the limit.
  // Any other code comes from a source that is broken.
  //
  // Attempts, each with a counter:
  //
  //   1. a cached block
  //   2. a deferred block whose tickets are done, after asking the device
  //   3. a deferred block whose tickets become done within max_wait_for_deferred
  //   4. growth
  //   5. growth after freeing cached segments
  //   6. with pageable_fallback, memory that is not pinned
  absl::StatusOr<PinnedBlock> Allocate(uint64_t size_bytes);

  // Grows until `size_bytes` more than the current use can be allocated without pinning, as blocks
  // of 32 KiB or more. Pins few large segments (of at most 1 GiB, or segment_bytes if that is
  // more), so that large blocks fit. Errors are those of Allocate. Pins nothing if the limit or the
  // host's RAM has no room for all of it. Segments that were pinned before a later refusal stay.
  // May wait for memory that other processes are pinning, in total up to 100 ms per segment.
  absl::Status Reserve(uint64_t size_bytes);

  // Frees unused segments until at most `keep_bytes` stay locked. Returns the freed bytes.
  // Unpinning can synchronise a device: call it between steps. (A growth may also unpin segments
  // that are too short, to make room for a longer one.) One thread trims or grows at a time; other
  // threads wait. Exception: a call from a callback of another allocator's growth or trim does not
  // wait.
  absl::StatusOr<uint64_t> Trim(uint64_t keep_bytes);

  // Returns whether an address lies in the allocator's memory, in use or not. May wait for a miss,
  // a trim or statistics of another thread.
  bool Owns(const void* address) const;

  AllocatorStats GetStats() const;

 private:
  struct Impl;
  explicit PinnedAllocator(std::unique_ptr<Impl> impl);

  // The slow path of Allocate, for a miss or an error.
  absl::StatusOr<PinnedBlock> AllocateOrRefuse(uint64_t size_bytes);
  absl::Status CheckFork() const;
  // Counts a failure, and returns the error of Allocate or Reserve.
  absl::Status Fail(const char* verb, uint64_t size_bytes, const absl::Status& cause);

  std::unique_ptr<Impl> impl_;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_PINNED_ALLOCATOR_H_
