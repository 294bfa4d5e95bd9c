// A block of host memory from a PinnedAllocator.
//
//   PINION_ASSIGN_OR_RETURN(PinnedBlock block, allocator->Allocate(5 * kMiB));
//   std::memcpy(block.data(), source, block.size_bytes());
//   ...                                            // copies between it and a device
//   std::move(block).ReleaseAfter({copy_ticket});  // or destroy it if no copy is running
//
// Move-only. The destructor makes the memory reusable at once. A block that a device may still
// access needs ReleaseAfter instead; engine/copy_batch.h calls it for you.
//
// Thread safety: a value. Different blocks may be used and released on different threads.
// Ownership: a block may outlive its PinnedAllocator. The memory is freed when both are destroyed.

#ifndef PINION_ALLOCATOR_PINNED_BLOCK_H_
#define PINION_ALLOCATOR_PINNED_BLOCK_H_

#include <cstdint>
#include <utility>

#include "absl/types/span.h"
#include "pinion/allocator/fence.h"

namespace pinion {

namespace internal {
struct BlockRecord;
}  // namespace internal

class PinnedBlock {
 public:
  PinnedBlock() = default;  // empty
  PinnedBlock(PinnedBlock&& other) noexcept { Take(other); }
  PinnedBlock& operator=(PinnedBlock&& other) noexcept {
    if (this != &other) {
      if (record_ != nullptr) Release();
      Take(other);
    }
    return *this;
  }
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;
  ~PinnedBlock() {
    if (record_ != nullptr) Release();
  }

  bool empty() const { return record_ == nullptr; }

  // Null and 0 for an empty block.
  void* data() const { return empty() ? nullptr : data_; }
  uint64_t size_bytes() const { return empty() ? 0 : size_bytes_; }  // as asked for
  // Unique among all blocks that this process ever allocated, even at a reused address.
  uint64_t id() const { return empty() ? 0 : id_; }

  // 0, -1 and false for an empty block.
  uint64_t capacity_bytes() const;  // the size, rounded to its class
  int numa_node() const;            // -1: unknown
  // Returns whether the pages are locked in RAM. False for memory of
  // AllocatorOptions::pageable_fallback, and of sources that lock nothing (MmapSource without
  // MmapOptions::lock).
  bool pinned() const;

  // Returns the block once every ticket is done. The block must not be empty, and is empty
  // afterwards. Neither waits nor calls a device. Exception: if the C++ heap is full, it waits for
  // the tickets for up to a second, and leaks a block that is not done by then.
  void ReleaseAfter(absl::Span<const FenceTicket> tickets) &&;

 private:
  friend class PinnedAllocator;

  explicit PinnedBlock(internal::BlockRecord* record);

  void Release();
  void Take(PinnedBlock& other) noexcept {
    record_ = std::exchange(other.record_, nullptr);
    data_ = other.data_;
    size_bytes_ = other.size_bytes_;
    id_ = other.id_;
  }

  // Copies of the record's fields, so that a thread that only frees does not touch the record's
  // cache line.
  internal::BlockRecord* record_ = nullptr;
  void* data_ = nullptr;
  uint64_t size_bytes_ = 0;
  uint64_t id_ = 0;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_PINNED_BLOCK_H_
