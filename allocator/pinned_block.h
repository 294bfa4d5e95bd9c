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

  // Null, 0 and 0 of an empty block.
  void* data() const { return empty() ? nullptr : data_; }
  uint64_t size_bytes() const { return empty() ? 0 : size_bytes_; }  // as asked for
  // Differs for every block that was ever handed out in this process, reused addresses included.
  uint64_t id() const { return empty() ? 0 : id_; }

  // 0, -1 and false of an empty block.
  uint64_t capacity_bytes() const;  // as booked: the size, rounded to its class
  int numa_node() const;            // -1: unknown
  // Whether the pages are locked in RAM: not those of AllocatorOptions::pageable_fallback, nor of a
  // source that locks none (MmapSource without MmapOptions::lock).
  bool pinned() const;

  // Returns the block once every ticket is done. The block is empty afterwards. It must not be
  // empty before. Does not wait, nor call a device, unless the C++ heap has no memory to note the
  // tickets: then it waits for them, a second at most, and leaks a block that is not done.
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

  // What the record says is copied: whoever frees on another thread than the one that allocates
  // takes no line of it away.
  internal::BlockRecord* record_ = nullptr;
  void* data_ = nullptr;
  uint64_t size_bytes_ = 0;
  uint64_t id_ = 0;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_PINNED_BLOCK_H_
