// Records of blocks. They lie outside the blocks' memory, because a device may be writing to it.

#ifndef PINION_ALLOCATOR_HEAP_BLOCK_RECORDS_H_
#define PINION_ALLOCATOR_HEAP_BLOCK_RECORDS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/attributes.h"

namespace pinion::internal {

class Arena;

enum class BlockState : uint8_t {
  kUnused,    // the record describes nothing
  kFree,      // in a free list, or in hand
  kLive,      // owned by a PinnedBlock; this state and the next two are in use
  kReleased,  // released, but not yet entered in the books
  kDeferred,  // released, waiting for tickets
  kSlab,      // cut into small blocks
  kEnds,      // no block: the ends of a run
};

// One cache line.
struct alignas(64) BlockRecord {
  char* data = nullptr;
  uint64_t capacity_bytes = 0;
  // Neighbours by address within the run. The outermost blocks have the run's `ends`.
  BlockRecord* before = nullptr;
  BlockRecord* after = nullptr;
  union {
    uint64_t size_bytes = 0;  // of used blocks: as requested
    // Links of the bucket's free list. Unused records are chained too.
    BlockRecord* next_free;
  };
  union {
    uint64_t pending_tickets = 0;  // of deferred blocks
    BlockRecord* previous_free;
  };
  uint64_t id = 0;  // of used blocks
  int16_t numa_node = -1;
  BlockState state = BlockState::kUnused;
};
static_assert(sizeof(BlockRecord) == 64);

inline void Connect(BlockRecord& before, BlockRecord& after) {
  before.after = &after;
  after.before = &before;
}

// Allocates the records of one heap's blocks. Records are reused and live as long as the heap, so a
// stale pointer to a released block still points to a record.
//
// Thread safety: none of its own. ArenaOf is thread-safe.
class BlockRecords {
 public:
  // `arena` is returned by ArenaOf.
  explicit BlockRecords(Arena* arena) : arena_(arena) {}
  BlockRecords(const BlockRecords&) = delete;
  BlockRecords& operator=(const BlockRecords&) = delete;

  // Makes the next `count` calls of Take (at most a chunk's) need no memory.
  void MakeRoom(size_t count) {
    for (const BlockRecord* record = unused_; record != nullptr && count > 0; --count) {
      record = record->next_free;
    }
    if (count > 0) AddChunk();
  }

  // Returns an unused record for the caller to fill.
  BlockRecord* Take() {
    if (unused_ == nullptr) AddChunk();
    return std::exchange(unused_, unused_->next_free);
  }

  void Put(BlockRecord* record) {
    record->state = BlockState::kUnused;
    record->next_free = unused_;
    unused_ = record;
  }

  // Returns the arena that a record belongs to. Reads a word that never changes. So a thread that
  // only releases a block does not take the record's cache line from the allocating thread.
  static Arena* ArenaOf(const BlockRecord* record) {
    return reinterpret_cast<const Chunk*>(reinterpret_cast<uintptr_t>(record) & ~(kChunkBytes - 1))
        ->arena;
  }

 private:
  static constexpr size_t kChunkBytes = 8192;

  struct alignas(kChunkBytes) Chunk {
    Arena* arena = nullptr;
    std::array<BlockRecord, kChunkBytes / sizeof(BlockRecord) - 1> records;
  };
  static_assert(sizeof(Chunk) == kChunkBytes);

  // Rarely called, so it stays out of line.
  ABSL_ATTRIBUTE_NOINLINE void AddChunk() {
    Chunk& chunk = *chunks_.emplace_back(std::make_unique<Chunk>());
    chunk.arena = arena_;
    // The lowest addresses are used first.
    for (size_t i = chunk.records.size(); i-- > 0;) Put(&chunk.records[i]);
  }

  Arena* const arena_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  BlockRecord* unused_ = nullptr;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HEAP_BLOCK_RECORDS_H_
