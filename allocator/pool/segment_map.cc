#include "pinion/allocator/pool/segment_map.h"

#include <algorithm>
#include <functional>
#include <iterator>

#include "pinion/allocator/base/bytes.h"

namespace pinion::internal {
namespace {

// At most 64 pieces per segment, because memory moves between threads piece by piece.
constexpr uint64_t kMostPieces = 64;
constexpr uint64_t kLeastPieceBytes = 2 * kMiB;

}  // namespace

std::vector<HostSegment> SegmentMap::Add(const HostSegment& segment) {
  const uint64_t piece_bytes =
      AlignUp(std::max(segment.size_bytes / kMostPieces, kLeastPieceBytes), alignment_bytes_);
  segments_[segment.data] = {segment, std::min(piece_bytes, segment.size_bytes), added_++};
  total_bytes_ += segment.size_bytes;
  std::vector<HostSegment> pieces;
  for (uint64_t begin = 0; begin < segment.size_bytes; begin += piece_bytes) {
    HostSegment& piece = pieces.emplace_back(segment);
    piece.data = static_cast<char*>(segment.data) + begin;
    piece.size_bytes = std::min(piece_bytes, segment.size_bytes - begin);
  }
  return pieces;
}

bool SegmentMap::Contains(const void* address) const {
  const auto above = segments_.upper_bound(address);
  if (above == segments_.begin()) return false;
  const HostSegment& segment = std::prev(above)->second.segment;
  return std::less<>()(address, static_cast<char*>(segment.data) + segment.size_bytes);
}

const SegmentMap::Entry& SegmentMap::Find(const void* address) const {
  return std::prev(segments_.upper_bound(address))->second;
}

SegmentHeap::Border SegmentMap::BorderAt(const void* address, const LimitedSource& source) const {
  const Entry& entry = Find(address);
  const int64_t offset = static_cast<const char*>(address) - static_cast<char*>(entry.segment.data);
  if (offset == 0 && !source.JoinsAt(address)) return SegmentHeap::Border::kCloses;
  return offset % static_cast<int64_t>(entry.piece_bytes) == 0 ? SegmentHeap::Border::kOpen
                                                               : SegmentHeap::Border::kGone;
}

uint64_t SegmentMap::LeastPieceBytes() const {
  uint64_t least_bytes = UINT64_MAX;
  for (const auto& [_, entry] : segments_) least_bytes = std::min(least_bytes, entry.piece_bytes);
  return least_bytes;
}

std::vector<HostSegment> SegmentMap::RemoveFree(const Removal& wanted,
                                                std::vector<std::vector<HostSegment>>* free) {
  std::map<const void*, uint64_t> free_bytes;  // by the first address of their segment
  for (const std::vector<HostSegment>& pieces : *free) {
    for (const HostSegment& piece : pieces) {
      free_bytes[Find(piece.data).segment.data] += piece.size_bytes;
    }
  }
  std::map<uint64_t, HostSegment, std::greater<>> free_segments;  // the newest first
  for (const auto& [data, entry] : segments_) {
    if (free_bytes[data] == entry.segment.size_bytes) free_segments[entry.number] = entry.segment;
  }
  uint64_t bytes = 0;
  std::vector<HostSegment> removed;
  for (const auto& [_, segment] : free_segments) {
    if (bytes >= wanted.bytes) break;
    if (segment.size_bytes <= wanted.longer_than_bytes) continue;
    removed.push_back(segment);
    bytes += segment.size_bytes;
  }
  if (wanted.all_or_none && bytes < wanted.bytes) return {};
  for (const HostSegment& segment : removed) segments_.erase(segment.data);
  for (std::vector<HostSegment>& pieces : *free) {
    std::erase_if(pieces, [&](const HostSegment& piece) { return !Contains(piece.data); });
  }
  total_bytes_ -= bytes;
  return removed;
}

std::vector<NumaNodeStats> SegmentMap::NumaNodes() const {
  std::map<int, NumaNodeStats> nodes;
  for (const auto& [_, entry] : segments_) {
    NumaNodeStats& node = nodes[entry.segment.numa_node];
    node.numa_node = entry.segment.numa_node;
    ++node.segments;
    node.locked_bytes += entry.segment.size_bytes;
  }
  std::vector<NumaNodeStats> result;
  for (const auto& [_, node] : nodes) result.push_back(node);
  return result;
}

}  // namespace pinion::internal
