#include "pinion/allocator/heap/block_records.h"

namespace pinion::internal {

void BlockRecords::MakeRoom(size_t count) {
  for (const BlockRecord* record = unused_; record != nullptr && count > 0; --count) {
    record = record->next_free;
  }
  if (count > 0) AddChunk();
}

void BlockRecords::AddChunk() {
  Chunk& chunk = *chunks_.emplace_back(std::make_unique<Chunk>());
  chunk.arena = arena_;
  // The lowest addresses are used first.
  for (size_t i = chunk.records.size(); i-- > 0;) Put(&chunk.records[i]);
}

}  // namespace pinion::internal
