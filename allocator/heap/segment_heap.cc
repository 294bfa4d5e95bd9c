#include "pinion/allocator/heap/segment_heap.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

namespace pinion::internal {
namespace {

char* EndOf(const HostSegment& segment) {
  return static_cast<char*>(segment.data) + segment.size_bytes;
}

void DropEmptyRuns(std::vector<std::unique_ptr<Run>>* runs) {
  std::erase_if(*runs, [](const std::unique_ptr<Run>& run) { return run->segments.empty(); });
}

}  // namespace

void SegmentHeap::AddSegment(const HostSegment& memory, BorderAt border_at) {
  segment_bytes_ += memory.size_bytes;
  Run* below = nullptr;
  Run* above = nullptr;
  for (const std::unique_ptr<Run>& run : runs_) {
    if (run->segments.front().numa_node != memory.numa_node) continue;
    if (EndOf(run->segments.back()) == memory.data) below = run.get();
    if (EndOf(memory) == run->segments.front().data) above = run.get();
  }
  runs_.push_back(NewRun(memory, large_));
  Run& added = *runs_.back();
  if (above != nullptr) JoinRuns(added, *above, border_at(EndOf(memory)));
  if (below != nullptr) JoinRuns(*below, added, border_at(memory.data));
  DropEmptyRuns(&runs_);
}

BlockRecord* SegmentHeap::FindAfterAll(uint64_t class_bytes) {
  if (IsSmallClass(class_bytes)) {
    AddSlab(class_bytes);
  } else {
    DissolveFreeSlabs();
  }
  return PartOf(class_bytes).free.Find(class_bytes);
}

std::vector<HostSegment> SegmentHeap::RemoveFreeSegments(uint64_t bytes, uint64_t hole_bytes) {
  DissolveFreeSlabs();
  std::vector<BlockRecord*> holes = large_.free.AtLeast(hole_bytes);
  if (holes.empty()) return {};
  std::sort(holes.begin(), holes.end(), [](const BlockRecord* a, const BlockRecord* b) {
    return std::less<>()(a->data, b->data);
  });
  struct Removable {
    Run* run;
    size_t index;
    BlockRecord* around;
  };
  std::vector<Removable> removables;
  uint64_t found_bytes = 0;
  for (size_t i = runs_.size(); i-- > 0;) {
    Run& run = *runs_[i];
    for (size_t index = run.segments.size(); index-- > 0 && found_bytes < bytes;) {
      const HostSegment& segment = run.segments[index];
      const auto above =
          std::partition_point(holes.begin(), holes.end(),
                               [&](const BlockRecord* hole) { return hole->data <= segment.data; });
      if (above == holes.begin()) continue;
      BlockRecord* const below = *std::prev(above);
      if (below->data + below->capacity_bytes < EndOf(segment)) continue;
      removables.push_back({&run, index, below});
      found_bytes += segment.size_bytes;
    }
  }
  std::vector<HostSegment> removed;
  // From the upper end of each run down, so that indices in the rest of a run stay valid.
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
  FreeLists& lists = large_.free;
  lists.Remove(around);
  char* const around_end = around->data + around->capacity_bytes;
  if (around_end > EndOf(segment)) {
    lists.Insert(NewBlock(EndOf(segment), around_end - EndOf(segment), around->numa_node, around,
                          around->after));
  }
  if (around->after != &run.ends) {
    auto upper = std::make_unique<Run>();
    upper->segments.assign(run.segments.begin() + index + 1, run.segments.end());
    Connect(upper->ends, *around->after);
    Connect(*run.ends.before, upper->ends);
    Connect(*around, run.ends);
    runs_.push_back(std::move(upper));
  }
  run.segments.resize(index);

  if (around->data < segment.data) {
    around->capacity_bytes = static_cast<char*>(segment.data) - around->data;
    lists.Insert(around);
  } else {
    Unlink(around);
  }
}

void SegmentHeap::JoinRuns(Run& lower, Run& upper, Border border) {
  if (border == Border::kCloses) return;
  auto first = upper.segments.begin();
  if (border == Border::kGone) lower.segments.back().size_bytes += first++->size_bytes;
  lower.segments.insert(lower.segments.end(), first, upper.segments.end());
  upper.segments.clear();
  BlockRecord* const below = lower.ends.before;
  BlockRecord* const above = upper.ends.after;
  Connect(*below, *above);
  Connect(*upper.ends.before, lower.ends);
  if (below->state != BlockState::kFree || above->state != BlockState::kFree) return;
  const uint64_t bytes = below->capacity_bytes + above->capacity_bytes;
  large_.free.Remove(above);
  Unlink(above);
  large_.free.Resize(below, bytes);
}

std::vector<HostSegment> SegmentHeap::FreeEnds() {
  DissolveFreeSlabs();
  std::vector<HostSegment> ends;
  const auto add = [&ends](const BlockRecord& block) {
    if (block.state != BlockState::kFree) return;
    ends.push_back({block.data, block.capacity_bytes, block.numa_node});
  };
  for (const std::unique_ptr<Run>& run : runs_) {
    add(*run->ends.after);
    if (run->ends.before != run->ends.after) add(*run->ends.before);
  }
  return ends;
}

std::vector<HostSegment> SegmentHeap::RemoveFreeEnd(const HostSegment& range) {
  for (const std::unique_ptr<Run>& run : runs_) {
    for (BlockRecord* const block : {run->ends.after, run->ends.before}) {
      char* const end = block->data + block->capacity_bytes;
      if (block->state != BlockState::kFree || block->data >= EndOf(range) || end <= range.data) {
        continue;
      }
      std::vector<HostSegment> removed;
      std::vector<HostSegment> kept;
      for (const HostSegment& segment : run->segments) {
        // Parts below the free end, in it, and above it. One of the outer parts is empty.
        char* const begin = static_cast<char*>(segment.data);
        char* const cuts[] = {begin, std::clamp(block->data, begin, EndOf(segment)),
                              std::clamp(end, begin, EndOf(segment)), EndOf(segment)};
        for (int part = 0; part < 3; ++part) {
          const auto bytes = static_cast<uint64_t>(cuts[part + 1] - cuts[part]);
          if (bytes == 0) continue;
          (part == 1 ? removed : kept).push_back({cuts[part], bytes, segment.numa_node});
        }
      }
      run->segments = std::move(kept);
      segment_bytes_ -= block->capacity_bytes;
      large_.free.Remove(block);
      Unlink(block);
      DropEmptyRuns(&runs_);
      return removed;
    }
  }
  return {};
}

std::map<int, uint64_t> SegmentHeap::UsedBytesByNode() const {
  std::map<int, uint64_t> used_bytes_of;
  for (const std::unique_ptr<Run>& run : runs_) used_bytes_of[run->segments.front().numa_node] = 0;
  if (used_bytes_of.size() == 1) {
    used_bytes_of.begin()->second = used_bytes();
    return used_bytes_of;
  }
  for (const auto* runs : {&runs_, &slabs_}) {
    for (const std::unique_ptr<Run>& run : *runs) {
      for (const BlockRecord* block = run->ends.after; block != &run->ends; block = block->after) {
        if (block->state == BlockState::kFree || block->state == BlockState::kSlab) continue;
        used_bytes_of[block->numa_node] += block->capacity_bytes;
      }
    }
  }
  return used_bytes_of;
}

std::unique_ptr<Run> SegmentHeap::NewRun(const HostSegment& memory, Part& part) {
  auto run = std::make_unique<Run>();
  run->segments.push_back(memory);
  part.free.Insert(NewBlock(static_cast<char*>(memory.data), memory.size_bytes, memory.numa_node,
                            &run->ends, &run->ends));
  return run;
}

void SegmentHeap::AddSlab(uint64_t class_bytes) {
  FreeLists& lists = large_.free;
  uint64_t bytes = bytes_per_slab_;
  BlockRecord* block = lists.Find(bytes);
  if (block == nullptr) {
    bytes = AlignUp(class_bytes, alignment_bytes_);
    block = lists.Find(bytes);
    if (block == nullptr) return;
  }
  // All memory is allocated first: records of the slab, of its free block, and of the rest.
  records_.MakeRoom(3);
  if (slabs_.size() == slabs_.capacity()) slabs_.reserve(2 * slabs_.size() + 1);
  Run& slab = *slabs_.emplace_back(NewRun({block->data, bytes, block->numa_node}, small_));
  slab.slab = Carve(lists, block, bytes);
  slab.slab->state = BlockState::kSlab;
  slab_bytes_ += bytes;
}

void SegmentHeap::DissolveFreeSlabs() {
  std::erase_if(slabs_, [this](const std::unique_ptr<Run>& slab) {
    BlockRecord* const block = slab->ends.after;
    if (block->state != BlockState::kFree || block->after != &slab->ends) return false;
    small_.free.Remove(block);
    records_.Put(block);
    slab_bytes_ -= slab->slab->capacity_bytes;
    Free(large_.free, slab->slab);
    return true;
  });
}

}  // namespace pinion::internal
