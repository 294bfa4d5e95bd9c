#include "pinion/allocator/heap/block_records.h"

namespace pinion::internal {
namespace {

constexpr int kRecordsPerChunk = 128;

}  // namespace

void BlockRecords::AddChunk() {
  chunks_.push_back(std::make_unique<BlockRecord[]>(kRecordsPerChunk));
  for (int i = 0; i < kRecordsPerChunk; ++i) {
    BlockRecord& record = chunks_.back()[i];
    record.arena = arena_;
    record.next_free = unused_;
    unused_ = &record;
  }
}

}  // namespace pinion::internal
