#include "pinion/allocator/pool/grower.h"

#include <algorithm>
#include <bit>

#include "absl/cleanup/cleanup.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion::internal {
namespace {

// A call that pins more holds a driver lock for about a second (TRT-LLM#17773).
constexpr uint64_t kLargestChunkBytes = kGiB;

// Size of the first segment, so that a small program does not pay for a chunk.
constexpr uint64_t kFirstSegmentBytes = 64 * kMiB;

// Divisor for the next attempt, when the host's RAM or the source refuses a segment.
constexpr uint64_t kNextSmallerSegment = 16;

// Smaller calls to the source are not worth their cost, where there is a choice.
constexpr uint64_t kWorthACallBytes = 16 * kMiB;

}  // namespace

constinit thread_local int turns_of_this_thread = 0;

Grower::Grower(std::shared_ptr<HostMemorySource> source, const AllocatorOptions& options,
               RamWatermark& watermark)
    : pool_(std::make_shared<SegmentPool>(std::move(source), options)),
      watermark_(watermark),
      largest_chunk_bytes_(std::max(kLargestChunkBytes, options.segment_bytes)),
      max_wait_for_deferred_(options.max_wait_for_deferred) {}

Grower::Result Grower::AllocateOnMiss(uint64_t size_bytes) {
  BlockRecord* const block = pool_->TakeDeferred(size_bytes, max_wait_for_deferred_);
  if (block != nullptr) return {.block = block};
  const TurnHolder turn(turn_);
  const Result result = Grow(size_bytes);
  ++refused_[static_cast<int>(result.refusal)];
  return result;
}

Grower::Result Grower::Grow(uint64_t size_bytes) {
  // Another thread may have grown the pool.
  if (BlockRecord* block = pool_->TryAllocate(size_bytes); block != nullptr) {
    return {.block = block};
  }
  const uint64_t least_bytes = pool_->LeastSegmentBytes(size_bytes);
  const uint64_t wished_bytes = WishedBytes(least_bytes);
  absl::Duration wait_left = RamWatermark::kLongestWait;
  const Result first = AddSegment(wished_bytes, least_bytes, size_bytes, wait_left);
  if (first.refusal == Refusal::kNone) return first;
  const uint64_t room = MakeRoom(first.refusal, least_bytes);
  // Another thread may have released a block.
  if (BlockRecord* block = pool_->TryAllocate(size_bytes); block != nullptr) {
    return {.block = block};
  }
  if (room == 0) return first;
  ++retries_;
  return AddSegment(std::max(least_bytes, std::min(room, wished_bytes)), least_bytes, size_bytes,
                    wait_left);
}

uint64_t Grower::WishedBytes(uint64_t least_bytes) const {
  const uint64_t chunk_bytes = pool_->segment_bytes();
  const uint64_t locked_bytes = pool_->locked_bytes();
  if (locked_bytes >= chunk_bytes) return std::max(least_bytes, chunk_bytes);
  // Up to a power of two: then chunks begin at multiples of their size, where they can be joined.
  const uint64_t added_bytes =
      std::max({least_bytes, pool_->source().granularity_bytes(),
                locked_bytes == 0 ? kFirstSegmentBytes : kWorthACallBytes});
  const uint64_t grown_bytes = std::bit_ceil(locked_bytes + added_bytes);
  return std::max(least_bytes, std::min(chunk_bytes, grown_bytes - locked_bytes));
}

absl::Status Grower::Reserve(uint64_t size_bytes) {
  const uint64_t granularity_bytes = pool_->source().granularity_bytes();
  const uint64_t chunk_bytes = AlignUp(largest_chunk_bytes_, granularity_bytes);
  pool_->PollDeferred();
  const TurnHolder turn(turn_);
  const auto missing_bytes = [&] {
    const uint64_t free_bytes = std::min(pool_->RoomForLargeBlocks(), size_bytes);
    return AlignUp(size_bytes - free_bytes, granularity_bytes);
  };
  Result result = CheckRoom(missing_bytes());
  // Proportional to the time that pinning takes. Any segment may need most of it: a segment that
  // another process pins counts twice for up to a second.
  absl::Duration wait_left = RamWatermark::kLongestWait * (missing_bytes() / chunk_bytes + 1);
  while (result.status.ok()) {
    const uint64_t segment_bytes = std::min(missing_bytes(), chunk_bytes);
    if (segment_bytes == 0) return absl::OkStatus();
    const uint64_t least_bytes =
        std::min(segment_bytes, std::max(granularity_bytes, kWorthACallBytes));
    result = AddSegment(segment_bytes, least_bytes, /*size_bytes=*/0, wait_left);
  }
  ++refused_[static_cast<int>(result.refusal)];
  return result.status;
}

Grower::Result Grower::CheckRoom(uint64_t bytes) {
  if (bytes == 0) return {};
  if (absl::Status status = pool_->source().Book(bytes); !status.ok()) {
    return {.status = std::move(status), .refusal = Refusal::kLimit};
  }
  pool_->source().Unbook(bytes);
  absl::Status status = watermark_.CheckGrowth(bytes);
  const Refusal refusal = status.ok() ? Refusal::kNone : Refusal::kWatermark;
  return {.status = std::move(status), .refusal = refusal};
}

LimitedSource::GivenBack Grower::Trim(uint64_t keep_bytes) {
  pool_->PollDeferred();
  // Other threads' growths wait, because freed bytes count until they are back.
  const TurnHolder turn(turn_);
  const uint64_t locked_bytes = pool_->locked_bytes();
  return pool_->GiveBack({.bytes = locked_bytes - std::min(locked_bytes, keep_bytes)});
}

AllocatorStats Grower::GetStats() const {
  AllocatorStats stats = pool_->GetStats();
  stats.growth_retries = retries_;
  stats.limit_refusals = Count(Refusal::kLimit);
  stats.watermark_refusals = Count(Refusal::kWatermark);
  stats.source_refusals = Count(Refusal::kSource);
  return stats;
}

Grower::Result Grower::AddSegment(uint64_t wished_bytes, uint64_t least_bytes, uint64_t size_bytes,
                                  absl::Duration& wait_left) {
  const uint64_t granularity_bytes = pool_->source().granularity_bytes();
  uint64_t segment_bytes =
      std::min(wished_bytes, AlignDown(pool_->source().BytesToLimit(), granularity_bytes));
  while (true) {
    segment_bytes = std::max(segment_bytes, least_bytes);
    Result result = TryAddSegment(segment_bytes, size_bytes, wait_left);
    // Reserve wants few segments, and sixteenths would be many calls.
    const bool may_be_smaller = result.refusal == Refusal::kWatermark ||
                                (result.refusal == Refusal::kSource && size_bytes != 0);
    if (!may_be_smaller || segment_bytes == least_bytes) return result;
    segment_bytes = AlignDown(segment_bytes / kNextSmallerSegment, granularity_bytes);
  }
}

Grower::Result Grower::TryAddSegment(uint64_t segment_bytes, uint64_t size_bytes,
                                     absl::Duration& wait_left) {
  LimitedSource& source = pool_->source();
  if (absl::Status status = source.Book(segment_bytes); !status.ok()) {
    return {.status = std::move(status), .refusal = Refusal::kLimit};
  }
  absl::Cleanup unbook = [&] { source.Unbook(segment_bytes); };
  const absl::StatusOr<RamWatermark::Growth> admitted =
      watermark_.AdmitGrowth(segment_bytes, wait_left);
  if (!admitted.ok()) return {.status = admitted.status(), .refusal = Refusal::kWatermark};
  const absl::StatusOr<HostSegment> segment = source.Pin(segment_bytes);
  if (!segment.ok()) {
    // Any other code means that the source is broken. Making room does not help.
    const bool exhausted = absl::IsResourceExhausted(segment.status());
    return {.status = segment.status(), .refusal = exhausted ? Refusal::kSource : Refusal::kNone};
  }
  std::move(unbook).Cancel();
  BlockRecord* const block = pool_->AddSegment(*segment, size_bytes);
  if (block != nullptr && segment_bytes > largest_chunk_bytes_) {
    // Frees older oversized segments. Otherwise a run whose longest block keeps growing would lock
    // the sum of all its maxima.
    pool_->GiveBack({.bytes = segment_bytes, .longer_than_bytes = largest_chunk_bytes_});
  }
  return {.block = block};
}

uint64_t Grower::MakeRoom(Refusal refusal, uint64_t segment_bytes) {
  uint64_t missing_bytes = 0;
  switch (refusal) {
    case Refusal::kNone:
      return 0;
    case Refusal::kLimit:
      missing_bytes = segment_bytes - std::min(segment_bytes, pool_->source().BytesToLimit());
      break;
    case Refusal::kWatermark:
      missing_bytes = watermark_.BytesToGiveBack(segment_bytes);
      // On a full host, cached memory is freed for the host's sake, even if it does not suffice.
      if (watermark_.level() == RamLevel::kHigh) {
        return pool_->GiveBack({.bytes = missing_bytes}).bytes;
      }
      break;
    case Refusal::kSource:
      return pool_->GiveBack({}).bytes;
  }
  if (missing_bytes == 0) return segment_bytes;  // another process or thread made room
  return pool_->GiveBack({.bytes = missing_bytes, .all_or_none = true}).bytes;
}

}  // namespace pinion::internal
