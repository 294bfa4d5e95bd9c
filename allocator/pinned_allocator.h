// A caching allocator of page-locked ("pinned") host memory under a budget for the host's RAM.
//
//   PINION_ASSIGN_OR_RETURN(std::shared_ptr<PinnedAllocator> allocator,
//                           PinnedAllocator::Create({}, std::move(source)));
//   PINION_ASSIGN_OR_RETURN(PinnedBlock block, allocator->Allocate(5 * kMiB));
//
// Pinning costs 0.1 to 1 s per GiB and may stall every process that uses the driver, so memory is
// pinned in large segments and kept; the first are 64 MiB, for programs that need little. Blocks
// are cut from segments by segregated fit (at least eight buckets per doubling: by default at
// most 12.5 % of a request is rounding, or less than 256 bytes below 2 KiB) and coalesced when they
// come back.
//
//   segment  |--used--|-free-|--used--|---------free---------|
//                        \______________/ buckets by size: first fit is best fit within 12.5 %
//
// Thread safety: thread-safe. No call to the source (but JoinsAt), to a timeline (but Completed) or
// to the operating system is made while a lock is held, but for what locks and heaps are made of:
// futex(2), mmap(2), and membarrier(2) with sched_yield(2) and nanosleep(2) where a thread needs
// memory that another one has free. One thread at a time grows; others that need to wait for it.
// Ownership: blocks may outlive the allocator object; their memory then goes with the last block.
// The C++ heap: where it has no memory for the books, a release does without (ReleaseAfter may wait
// then), and other calls throw std::bad_alloc and have lost nothing. But where it fails while
// memory moves from thread to thread, is added or is given back, the process ends; so it does where
// it fails at the allocator's end, or with the last block that outlives it.
// Fork: a child of fork() may destroy what it inherits, which does nothing. Its other calls return
// FailedPrecondition (and empty statistics; Owns is false): pinned memory is the parent's alone.

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
  // InvalidArgument for bad options (the message names the field) and for a source that is null or
  // of an impossible granularity. With a ledger_directory also Unavailable, if its file cannot be
  // had, and PermissionDenied, if that is another user's. `ram` is this host, whose budget all
  // Pinion processes of the user share; tests inject fixtures.
  static absl::StatusOr<std::shared_ptr<PinnedAllocator>> Create(
      const AllocatorOptions& options, std::shared_ptr<HostMemorySource> source,
      HostRam ram = HostRam());

  ~PinnedAllocator();
  PinnedAllocator(const PinnedAllocator&) = delete;
  PinnedAllocator& operator=(const PinnedAllocator&) = delete;

  // A block of at least `size_bytes`, aligned to alignment_bytes from 32 KiB on, else to
  // --//config:min_block_bytes (256).
  // InvalidArgument for 0 and for more than 2^47. ResourceExhausted when the budget or the source
  // refuses and no cached block fits: the message names the request, what is locked, and which
  // limit was hit. Any other code is the source's: it is broken for good.
  //
  // The order of attempts, each counted: a cached block; one whose tickets have got done, after
  // asking the device; waiting for one, up to max_wait_for_deferred; growth; a second growth after
  // cached segments were given back; with pageable_fallback, memory that is not pinned.
  absl::StatusOr<PinnedBlock> Allocate(uint64_t size_bytes);

  // Grows until `size_bytes` more than what is in use can be served without pinning, as blocks of
  // 32 KiB or more. What is missing is pinned in as few segments as can be had (of at most 1 GiB,
  // or segment_bytes where that is more), so that large blocks fit as well. Errors as those of
  // Allocate. Nothing is pinned where the limit or the host's RAM has no room for all of it; what
  // was gained before the source refuses, or others take the room, stays.
  absl::Status Reserve(uint64_t size_bytes);

  // Gives wholly free segments back until at most `keep_bytes` stay locked. Returns the bytes
  // given back. Unpinning can synchronise a device: call it between steps. (A growth may unpin,
  // too, where segments that are too short make room for a longer one.) One thread at a time trims
  // or grows; the others wait for it, but for those that a callback of another allocator's growth
  // or trim has brought here.
  absl::StatusOr<uint64_t> Trim(uint64_t keep_bytes);

  // Whether an address lies in memory that the allocator holds, in use or not. May wait for a miss,
  // a trim or statistics of another thread.
  bool Owns(const void* address) const;

  AllocatorStats GetStats() const;

 private:
  class Impl;
  explicit PinnedAllocator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_PINNED_ALLOCATOR_H_
