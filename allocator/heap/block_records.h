// The records of one heap's blocks. They serve again, and are given back with the heap only:
// whoever holds on to a block that was released finds a record, if not the same block's.
//
// Thread safety: none of its own.

#ifndef PINION_ALLOCATOR_HEAP_BLOCK_RECORDS_H_
#define PINION_ALLOCATOR_HEAP_BLOCK_RECORDS_H_

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

  // A record that describes nothing, for the caller to fill.
  BlockRecord* Take() {
    if (unused_ == nullptr) AddChunk();
    return std::exchange(unused_, unused_->next_free);
  }

  void Put(BlockRecord* record) {
    // Not its arena, which may be read by whoever releases a block twice.
    record->state = BlockState::kUnused;
    record->id = 0;
    record->next_free = unused_;
    unused_ = record;
  }

 private:
  void AddChunk();

  Arena* const arena_;
  std::vector<std::unique_ptr<BlockRecord[]>> chunks_;
  BlockRecord* unused_ = nullptr;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HEAP_BLOCK_RECORDS_H_
