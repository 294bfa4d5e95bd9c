#include "pinion/allocator/segment_heap.h"

#include <cstddef>
#include <map>
#include <memory>
#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/allocator/size_class.h"

namespace pinion::internal {
namespace {

constexpr int kRecordsPerChunk = 128;

}  // namespace

void SegmentHeap::AddSegment(const HostSegment& memory) {
  segments_.push_back(NewSegment(memory, /*slab=*/nullptr));
  segment_bytes_ += memory.size_bytes;
}

BlockRecord* SegmentHeap::Take(uint64_t class_bytes) {
  const bool small = IsSmallClass(class_bytes);
  FreeLists& lists = small ? small_ : large_;
  BlockRecord* block = lists.Find(class_bytes);
  if (block == nullptr) {
    const bool look_again = small ? AddSlab(class_bytes) : DissolveFreeSlabs();
    if (look_again) block = lists.Find(class_bytes);
    if (block == nullptr) return nullptr;
  }
  Carve(block, class_bytes);
  block->state = BlockState::kLive;
  Segment* const segment = block->segment;
  segment->used_bytes += class_bytes;
  if (segment->slab != nullptr) segment->slab->segment->used_bytes += class_bytes;
  return block;
}

void SegmentHeap::Put(BlockRecord* block) {
  Segment* const segment = block->segment;
  segment->used_bytes -= block->capacity_bytes;
  if (segment->slab != nullptr) segment->slab->segment->used_bytes -= block->capacity_bytes;
  Free(block);
}

std::vector<HostSegment> SegmentHeap::RemoveFreeSegments(const Removal& wanted) {
  DissolveFreeSlabs();
  const auto removable = [&](const Segment& segment) {
    return segment.used_blocks == 0 && segment.memory.size_bytes > wanted.longer_than_bytes;
  };
  std::vector<HostSegment> removed;
  if (wanted.all_or_none) {
    uint64_t removable_bytes = 0;
    for (const std::unique_ptr<Segment>& segment : segments_) {
      if (removable(*segment)) removable_bytes += segment->memory.size_bytes;
    }
    if (removable_bytes < wanted.bytes) return removed;
  }
  uint64_t removed_bytes = 0;
  for (size_t i = segments_.size(); i-- > 0 && removed_bytes < wanted.bytes;) {
    if (!removable(*segments_[i])) continue;
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

std::unique_ptr<Segment> SegmentHeap::NewSegment(const HostSegment& memory, BlockRecord* slab) {
  auto segment = std::make_unique<Segment>();
  segment->memory = memory;
  segment->slab = slab;
  BlockRecord* const block = NewRecord();
  block->data = static_cast<char*>(memory.data);
  block->capacity_bytes = memory.size_bytes;
  block->segment = segment.get();
  segment->first = block;
  InsertFree(block);
  return segment;
}

void SegmentHeap::Carve(BlockRecord* block, uint64_t bytes) {
  RemoveFree(block);
  ++block->segment->used_blocks;
  if (block->capacity_bytes == bytes) return;
  BlockRecord* const rest = NewRecord();
  rest->data = block->data + bytes;
  rest->capacity_bytes = block->capacity_bytes - bytes;
  rest->segment = block->segment;
  rest->before = block;
  rest->after = block->after;
  if (rest->after != nullptr) rest->after->before = rest;
  block->after = rest;
  block->capacity_bytes = bytes;
  InsertFree(rest);
}

void SegmentHeap::Free(BlockRecord* block) {
  --block->segment->used_blocks;
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

bool SegmentHeap::AddSlab(uint64_t class_bytes) {
  uint64_t bytes = slab_bytes_;
  BlockRecord* block = large_.Find(bytes);
  if (block == nullptr) {
    bytes = RoomFor(class_bytes);
    block = large_.Find(bytes);
    if (block == nullptr) return false;
  }
  Carve(block, bytes);
  block->state = BlockState::kSlab;
  slabs_.push_back(NewSegment({block->data, bytes, block->segment->memory.numa_node}, block));
  return true;
}

bool SegmentHeap::DissolveFreeSlabs() {
  const size_t dissolved = std::erase_if(slabs_, [this](const std::unique_ptr<Segment>& slab) {
    if (slab->used_blocks != 0) return false;
    RemoveFree(slab->first);
    Recycle(slab->first);
    Free(slab->slab);
    return true;
  });
  return dissolved != 0;
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
  if (block->segment->slab != nullptr) {
    small_.Insert(block);
  } else {
    large_.Insert(block);
    large_free_bytes_ += block->capacity_bytes;
  }
}

void SegmentHeap::RemoveFree(BlockRecord* block) {
  if (block->segment->slab != nullptr) {
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
