#include "pinion/allocator/heap/segment_heap.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/allocator/heap/size_class.h"

namespace pinion::internal {
namespace {

char* EndOf(const HostSegment& segment) {
  return static_cast<char*>(segment.data) + segment.size_bytes;
}

void DropEmptyRuns(std::vector<std::unique_ptr<Run>>* runs) {
  std::erase_if(*runs, [](const std::unique_ptr<Run>& run) { return run->segments.empty(); });
}

}  // namespace

void SegmentHeap::AddSegment(const HostSegment& memory, JoinsAt joins_at) {
  segment_bytes_ += memory.size_bytes;
  Run* below = nullptr;
  Run* above = nullptr;
  for (const std::unique_ptr<Run>& run : runs_) {
    if (run->segments.front().numa_node != memory.numa_node) continue;
    if (EndOf(run->segments.back()) == memory.data) below = run.get();
    if (EndOf(memory) == run->segments.front().data) above = run.get();
  }
  runs_.push_back(NewRun(memory, /*slab=*/nullptr));
  Run& added = *runs_.back();
  if (above != nullptr && joins_at(EndOf(memory))) JoinRuns(added, *above);
  if (below != nullptr && joins_at(memory.data)) JoinRuns(*below, added);
  DropEmptyRuns(&runs_);
}

BlockRecord* SegmentHeap::Take(uint64_t class_bytes) {
  const bool small = IsSmallClass(class_bytes);
  FreeLists& lists = small ? small_ : large_;
  BlockRecord* block = lists.Find(class_bytes);
  if (block == nullptr) {
    if (small) {
      AddSlab(class_bytes);
    } else {
      DissolveFreeSlabs();
    }
    block = lists.Find(class_bytes);
    if (block == nullptr) return nullptr;
  }
  block = Carve(block, class_bytes);
  block->state = BlockState::kLive;
  Run* const run = block->run;
  run->used_bytes += class_bytes;
  if (run->slab != nullptr) run->slab->run->used_bytes += class_bytes;
  return block;
}

void SegmentHeap::Put(BlockRecord* block) {
  Run* const run = block->run;
  run->used_bytes -= block->capacity_bytes;
  if (run->slab != nullptr) run->slab->run->used_bytes -= block->capacity_bytes;
  Free(block);
}

std::vector<HostSegment> SegmentHeap::RemoveFreeSegments(uint64_t bytes) {
  DissolveFreeSlabs();
  struct Removable {
    Run* run;
    size_t index;
    BlockRecord* around;
  };
  std::vector<Removable> removables;
  uint64_t found_bytes = 0;
  for (size_t i = runs_.size(); i-- > 0 && found_bytes < bytes;) {
    Run& run = *runs_[i];
    BlockRecord* block = run.last;
    for (size_t index = run.segments.size(); index-- > 0 && found_bytes < bytes;) {
      const HostSegment& segment = run.segments[index];
      while (block->data >= EndOf(segment)) block = block->before;
      if (block->state != BlockState::kFree || block->data > segment.data) continue;
      removables.push_back({&run, index, block});
      found_bytes += segment.size_bytes;
    }
  }
  std::vector<HostSegment> removed;
  // From the upper end of each run down: what stays of a run keeps its indices.
  for (const Removable& removable : removables) {
    removed.push_back(removable.run->segments[removable.index]);
    segment_bytes_ -= removed.back().size_bytes;
    RemoveSegment(*removable.run, removable.index, removable.around);
  }
  DropEmptyRuns(&runs_);
  return removed;
}

void SegmentHeap::RemoveSegment(Run& run, size_t index, BlockRecord* around) {
  const HostSegment segment = run.segments[index];
  RemoveFree(around);
  char* const around_end = around->data + around->capacity_bytes;
  BlockRecord* above = around->after;
  if (around_end > EndOf(segment)) {
    BlockRecord* const rest = NewBlock(EndOf(segment), around_end - EndOf(segment), run);
    rest->after = above;
    if (above != nullptr) above->before = rest;
    InsertFree(rest);
    above = rest;
  }
  if (above != nullptr) {
    auto upper = std::make_unique<Run>();
    upper->segments.assign(run.segments.begin() + index + 1, run.segments.end());
    upper->first = above;
    upper->last = around->after == nullptr ? above : run.last;
    above->before = nullptr;
    MoveBlocks(run, *upper);
    runs_.push_back(std::move(upper));
  }
  run.segments.resize(index);

  around->after = nullptr;
  if (around->data < segment.data) {
    around->capacity_bytes = static_cast<char*>(segment.data) - around->data;
    run.last = around;
    InsertFree(around);
  } else {
    run.last = around->before;
    if (run.last != nullptr) run.last->after = nullptr;
    records_.Put(around);
  }
}

void SegmentHeap::MoveBlocks(Run& from, Run& to) {
  for (BlockRecord* block = to.first; block != nullptr; block = block->after) {
    block->run = &to;
    if (block->state == BlockState::kFree || block->state == BlockState::kSlab) continue;
    from.used_bytes -= block->capacity_bytes;
    to.used_bytes += block->capacity_bytes;
  }
  for (const std::unique_ptr<Run>& slab : slabs_) {
    if (slab->slab->run != &to) continue;
    from.used_bytes -= slab->used_bytes;
    to.used_bytes += slab->used_bytes;
  }
}

void SegmentHeap::JoinRuns(Run& lower, Run& upper) {
  lower.segments.insert(lower.segments.end(), upper.segments.begin(), upper.segments.end());
  upper.segments.clear();
  for (BlockRecord* block = upper.first; block != nullptr; block = block->after) {
    block->run = &lower;
  }
  lower.used_bytes += upper.used_bytes;
  BlockRecord* const below = lower.last;
  BlockRecord* const above = upper.first;
  below->after = above;
  above->before = below;
  lower.last = upper.last;
  if (below->state != BlockState::kFree || above->state != BlockState::kFree) return;
  const uint64_t bytes = below->capacity_bytes + above->capacity_bytes;
  RemoveFree(above);
  Unlink(above);
  ResizeFree(below, bytes);
}

std::vector<NumaNodeStats> SegmentHeap::NumaNodes() const {
  std::map<int, NumaNodeStats> nodes;
  for (const std::unique_ptr<Run>& run : runs_) {
    const int numa_node = run->segments.front().numa_node;
    NumaNodeStats& node = nodes[numa_node];
    node.numa_node = numa_node;
    node.segments += run->segments.size();
    for (const HostSegment& segment : run->segments) node.locked_bytes += segment.size_bytes;
    node.used_bytes += run->used_bytes;
  }
  std::vector<NumaNodeStats> result;
  for (const auto& [_, node] : nodes) result.push_back(node);
  return result;
}

std::unique_ptr<Run> SegmentHeap::NewRun(const HostSegment& memory, BlockRecord* slab) {
  auto run = std::make_unique<Run>();
  run->segments.push_back(memory);
  run->slab = slab;
  BlockRecord* const block = NewBlock(static_cast<char*>(memory.data), memory.size_bytes, *run);
  run->first = block;
  run->last = block;
  InsertFree(block);
  return run;
}

BlockRecord* SegmentHeap::Carve(BlockRecord* free, uint64_t bytes) {
  if (free->capacity_bytes == bytes) {
    RemoveFree(free);
    return free;
  }
  BlockRecord* const taken = NewBlock(free->data, bytes, *free->run);
  taken->before = free->before;
  taken->after = free;
  if (taken->before != nullptr) {
    taken->before->after = taken;
  } else {
    free->run->first = taken;
  }
  free->before = taken;
  free->data += bytes;
  ResizeFree(free, free->capacity_bytes - bytes);
  return taken;
}

void SegmentHeap::Free(BlockRecord* block) {
  BlockRecord* const before = block->before;
  BlockRecord* const after = block->after;
  const bool joins_before = before != nullptr && before->state == BlockState::kFree;
  const bool joins_after = after != nullptr && after->state == BlockState::kFree;
  uint64_t bytes = block->capacity_bytes;
  if (joins_before) {
    if (joins_after) {
      bytes += after->capacity_bytes;
      RemoveFree(after);
      Unlink(after);
    }
    Unlink(block);
    ResizeFree(before, before->capacity_bytes + bytes);
  } else if (joins_after) {
    after->data = block->data;
    Unlink(block);
    ResizeFree(after, after->capacity_bytes + bytes);
  } else {
    InsertFree(block);
  }
}

void SegmentHeap::AddSlab(uint64_t class_bytes) {
  uint64_t bytes = slab_bytes_;
  BlockRecord* block = large_.Find(bytes);
  if (block == nullptr) {
    bytes = AlignUp(class_bytes, alignment_bytes_);
    block = large_.Find(bytes);
    if (block == nullptr) return;
  }
  block = Carve(block, bytes);
  block->state = BlockState::kSlab;
  slabs_.push_back(NewRun({block->data, bytes, block->numa_node}, block));
}

void SegmentHeap::DissolveFreeSlabs() {
  std::erase_if(slabs_, [this](const std::unique_ptr<Run>& slab) {
    if (slab->used_bytes != 0) return false;
    RemoveFree(slab->first);
    records_.Put(slab->first);
    Free(slab->slab);
    return true;
  });
}

BlockRecord* SegmentHeap::NewBlock(char* data, uint64_t capacity_bytes, Run& run) {
  BlockRecord* const block = records_.Take();
  block->data = data;
  block->capacity_bytes = capacity_bytes;
  block->run = &run;
  block->before = nullptr;
  block->after = nullptr;
  block->numa_node = static_cast<int16_t>(run.segments.front().numa_node);
  return block;
}

void SegmentHeap::InsertFree(BlockRecord* block) {
  block->state = BlockState::kFree;
  if (block->run->slab != nullptr) {
    small_.Insert(block);
  } else {
    large_.Insert(block);
    large_free_bytes_ += block->capacity_bytes;
  }
}

void SegmentHeap::RemoveFree(BlockRecord* block) {
  PINION_CHECK(block->state == BlockState::kFree)
      << "a block of " << block->capacity_bytes << " bytes is taken out of the free ones and is in "
      << "state " << static_cast<int>(block->state);
  if (block->run->slab != nullptr) {
    small_.Remove(block);
  } else {
    large_.Remove(block);
    large_free_bytes_ -= block->capacity_bytes;
  }
}

void SegmentHeap::ResizeFree(BlockRecord* block, uint64_t capacity_bytes) {
  if (block->run->slab != nullptr) {
    small_.Resize(block, capacity_bytes);
  } else {
    large_free_bytes_ += capacity_bytes - block->capacity_bytes;
    large_.Resize(block, capacity_bytes);
  }
}

void SegmentHeap::Unlink(BlockRecord* block) {
  if (block->before != nullptr) {
    block->before->after = block->after;
  } else {
    block->run->first = block->after;
  }
  if (block->after != nullptr) {
    block->after->before = block->before;
  } else {
    block->run->last = block->before;
  }
  records_.Put(block);
}

}  // namespace pinion::internal
