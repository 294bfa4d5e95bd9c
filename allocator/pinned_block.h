// A block of host memory from a PinnedAllocator.
//
//   PINION_ASSIGN_OR_RETURN(PinnedBlock block, allocator->Allocate(5 * kMiB));
//   std::memcpy(block.data(), source, block.size_bytes());
//   ...                                            // copies that a device makes from or to it
//   std::move(block).ReleaseAfter({copy_ticket});  // or let it go out of scope: no copy runs
//
// Move-only. The destructor returns the block for immediate reuse, so whoever lets a device touch
// it calls ReleaseAfter instead (engine/host_buffer.h does that by construction).
//
// Thread safety: a value; different blocks may be used and released on different threads.
// Ownership: a block may outlive its PinnedAllocator: the memory goes when both are gone.

#ifndef PINION_ALLOCATOR_PINNED_BLOCK_H_
#define PINION_ALLOCATOR_PINNED_BLOCK_H_

#include <cstdint>
#include <utility>

#include "absl/types/span.h"
#include "pinion/allocator/fence.h"

namespace pinion {

namespace internal {
class SegmentPool;
struct BlockRecord;
}  // namespace internal

class PinnedBlock {
 public:
  PinnedBlock() = default;  // empty
  PinnedBlock(PinnedBlock&& other) noexcept { Swap(other); }
  PinnedBlock& operator=(PinnedBlock&& other) noexcept {
    PinnedBlock moved(std::move(other));
    Swap(moved);
    return *this;
  }
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;
  ~PinnedBlock() {
    if (record_ != nullptr) Release();
  }

  bool empty() const { return record_ == nullptr; }

  void* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }  // as asked for
  // As booked: the size, rounded to its bucket.
  uint64_t capacity_bytes() const { return capacity_bytes_; }
  int numa_node() const { return numa_node_; }  // -1: unknown
  // False only with AllocatorOptions::pageable_fallback.
  bool pinned() const { return pinned_; }
  // Differs for every block that was ever handed out in this process, reused addresses included.
  uint64_t id() const { return id_; }

  // Returns the block once every ticket is done. The block is empty afterwards. It must not be
  // empty before.
  void ReleaseAfter(absl::Span<const FenceTicket> tickets) &&;

 private:
  friend class PinnedAllocator;

  PinnedBlock(internal::SegmentPool* pool, internal::BlockRecord* record);

  void Release();
  void Swap(PinnedBlock& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(record_, other.record_);
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    std::swap(capacity_bytes_, other.capacity_bytes_);
    std::swap(id_, other.id_);
    std::swap(numa_node_, other.numa_node_);
    std::swap(pinned_, other.pinned_);
  }

  internal::SegmentPool* pool_ = nullptr;
  internal::BlockRecord* record_ = nullptr;
  void* data_ = nullptr;
  uint64_t size_bytes_ = 0;
  uint64_t capacity_bytes_ = 0;
  uint64_t id_ = 0;
  int numa_node_ = -1;
  bool pinned_ = false;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_PINNED_BLOCK_H_
