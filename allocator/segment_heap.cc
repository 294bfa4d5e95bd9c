#include "pinion/allocator/segment_heap.h"

#include <cstddef>
#include <map>
#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/allocator/size_class.h"

namespace pinion::internal {
namespace {

constexpr int kRecordsPerChunk = 128;

}  // namespace

void SegmentHeap::AddSegment(const HostSegment& memory, bool small) {
  auto segment = std::make_unique<Segment>();
  segment->memory = memory;
  segment->small = small;
  BlockRecord* block = NewRecord();
  block->data = static_cast<char*>(memory.data);
  block->capacity_bytes = memory.size_bytes;
  block->segment = segment.get();
  segment->first = block;
  segments_.push_back(std::move(segment));
  segment_bytes_ += memory.size_bytes;
  InsertFree(block);
}

BlockRecord* SegmentHeap::Take(uint64_t class_bytes) {
  BlockRecord* block = (IsSmallClass(class_bytes) ? small_ : large_).Find(class_bytes);
  if (block == nullptr) return nullptr;
  RemoveFree(block);
  if (block->capacity_bytes > class_bytes) {
    BlockRecord* rest = NewRecord();
    rest->data = block->data + class_bytes;
    rest->capacity_bytes = block->capacity_bytes - class_bytes;
    rest->segment = block->segment;
    rest->before = block;
    rest->after = block->after;
    if (rest->after != nullptr) rest->after->before = rest;
    block->after = rest;
    block->capacity_bytes = class_bytes;
    InsertFree(rest);
  }
  block->state = BlockState::kLive;
  ++block->segment->used_blocks;
  block->segment->used_bytes += class_bytes;
  return block;
}

void SegmentHeap::Put(BlockRecord* block) {
  PINION_DCHECK(block->state == BlockState::kLive || block->state == BlockState::kDeferred);
  --block->segment->used_blocks;
  block->segment->used_bytes -= block->capacity_bytes;
  if (BlockRecord* after = block->after; after != nullptr && after->state == BlockState::kFree) {
    RemoveFree(after);
    Join(block, after);
  }
  if (BlockRecord* before = block->before;
      before != nullptr && before->state == BlockState::kFree) {
    RemoveFree(before);
    Join(before, block);
    block = before;
  }
  InsertFree(block);
}

std::vector<HostSegment> SegmentHeap::RemoveFreeSegments(uint64_t bytes, bool keep_small) {
  std::vector<HostSegment> removed;
  uint64_t removed_bytes = 0;
  for (size_t i = segments_.size(); i-- > 0 && removed_bytes < bytes;) {
    if (segments_[i]->used_blocks != 0 || (keep_small && segments_[i]->small)) continue;
    const std::unique_ptr<Segment> segment = std::move(segments_[i]);
    segments_.erase(segments_.begin() + static_cast<ptrdiff_t>(i));
    RemoveFree(segment->first);
    Recycle(segment->first);
    segment_bytes_ -= segment->memory.size_bytes;
    removed_bytes += segment->memory.size_bytes;
    removed.push_back(segment->memory);
  }
  return removed;
}

std::vector<NumaNodeStats> SegmentHeap::NumaNodes() const {
  std::map<int, NumaNodeStats> nodes;
  for (const std::unique_ptr<Segment>& segment : segments_) {
    NumaNodeStats& node = nodes[segment->memory.numa_node];
    node.numa_node = segment->memory.numa_node;
    ++node.segments;
    node.locked_bytes += segment->memory.size_bytes;
    node.used_bytes += segment->used_bytes;
  }
  std::vector<NumaNodeStats> result;
  for (const auto& [_, node] : nodes) result.push_back(node);
  return result;
}

BlockRecord* SegmentHeap::NewRecord() {
  if (unused_records_ == nullptr) {
    record_chunks_.push_back(std::make_unique<BlockRecord[]>(kRecordsPerChunk));
    BlockRecord* chunk = record_chunks_.back().get();
    for (int i = 0; i < kRecordsPerChunk; ++i) {
      chunk[i].next_free = unused_records_;
      unused_records_ = &chunk[i];
    }
  }
  BlockRecord* record = std::exchange(unused_records_, unused_records_->next_free);
  record->next_free = nullptr;
  return record;
}

void SegmentHeap::Recycle(BlockRecord* block) {
  *block = BlockRecord();
  block->next_free = unused_records_;
  unused_records_ = block;
}

void SegmentHeap::InsertFree(BlockRecord* block) {
  block->state = BlockState::kFree;
  if (block->segment->small) {
    small_.Insert(block);
  } else {
    large_.Insert(block);
    large_free_bytes_ += block->capacity_bytes;
  }
}

void SegmentHeap::RemoveFree(BlockRecord* block) {
  if (block->segment->small) {
    small_.Remove(block);
  } else {
    large_.Remove(block);
    large_free_bytes_ -= block->capacity_bytes;
  }
}

void SegmentHeap::Join(BlockRecord* lower, BlockRecord* upper) {
  lower->capacity_bytes += upper->capacity_bytes;
  lower->after = upper->after;
  if (lower->after != nullptr) lower->after->before = lower;
  Recycle(upper);
}

}  // namespace pinion::internal
