// The records of one heap's blocks. They serve again, and are given back with the heap only:
// whoever holds on to a block that was released finds a record, if not the same block's.
//
// Thread safety: none of its own; ArenaOf is thread-safe.

#ifndef PINION_ALLOCATOR_HEAP_BLOCK_RECORDS_H_
#define PINION_ALLOCATOR_HEAP_BLOCK_RECORDS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "pinion/allocator/heap/segment.h"

namespace pinion::internal {

class BlockRecords {
 public:
  // `arena` is what they all belong to.
  explicit BlockRecords(Arena* arena) : arena_(arena) {}
  BlockRecords(const BlockRecords&) = delete;
  BlockRecords& operator=(const BlockRecords&) = delete;

  // So that Take needs no memory for the next `count` records, a chunk's at most.
  void MakeRoom(size_t count);

  // A record that describes nothing, for the caller to fill.
  BlockRecord* Take() {
    if (unused_ == nullptr) AddChunk();
    return std::exchange(unused_, unused_->next_free);
  }

  void Put(BlockRecord* record) {
    record->state = BlockState::kUnused;
    record->next_free = unused_;
    unused_ = record;
  }

  // What a record belongs to. Reads nothing that changes while the record exists, so that a thread
  // that releases a block takes no line away from the thread that allocated it.
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

  void AddChunk();

  Arena* const arena_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  BlockRecord* unused_ = nullptr;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HEAP_BLOCK_RECORDS_H_
