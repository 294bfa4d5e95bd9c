#include "pinion/allocator/pinned_block.h"

#include "pinion/allocator/base/check.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/pool/segment_pool.h"

namespace pinion {

using internal::BlockRecord;
using internal::SegmentPool;

PinnedBlock::PinnedBlock(BlockRecord* record)
    : record_(record), data_(record->data), size_bytes_(record->size_bytes), id_(record->id) {}

uint64_t PinnedBlock::capacity_bytes() const { return empty() ? 0 : record_->capacity_bytes; }

int PinnedBlock::numa_node() const { return empty() ? -1 : record_->numa_node; }

bool PinnedBlock::pinned() const {
  return !empty() && internal::BlockRecords::ArenaOf(record_)->pool()->pinned();
}

void PinnedBlock::ReleaseAfter(absl::Span<const FenceTicket> tickets) && {
  PINION_CHECK(!empty()) << "ReleaseAfter on an empty block";
  PinnedBlock block(std::move(*this));
  SegmentPool::ReleaseAfter(std::exchange(block.record_, nullptr), block.id_, tickets);
}

void PinnedBlock::Release() { SegmentPool::Release(std::exchange(record_, nullptr), id_); }

}  // namespace pinion
