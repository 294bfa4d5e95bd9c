#include "pinion/allocator/pinned_allocator.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/heap/segment.h"
#include "pinion/allocator/heap/size_class.h"
#include "pinion/allocator/pool/segment_pool.h"
#include "pinion/allocator/pool/turn.h"
#include "pinion/allocator/ram/ram_watermark.h"
#include "pinion/allocator/sources/mmap_source.h"

namespace pinion {
namespace {

using internal::BlockRecord;
using internal::SegmentPool;

constexpr uint64_t kPageBytes = 4096;

// One call that pins more holds a lock of the driver's for about a second (TRT-LLM#17773).
constexpr uint64_t kLargestChunkBytes = kGiB;

// Where the host's RAM has no room for a segment, the next attempt is for 1/16 of its size.
constexpr uint64_t kNextSmallerSegment = 16;

// A call that pins is worth its cost from this size on, where there is a choice.
constexpr uint64_t kLeastReservedBytes = 16 * kMiB;

// Memory that is not pinned costs nothing but its pages, which are touched at once.
constexpr uint64_t kPageableSegmentBytes = 64 * kMiB;

}  // namespace

class PinnedAllocator::Impl {
 public:
  // A block and what it belongs to.
  struct Served {
    SegmentPool* pool = nullptr;
    BlockRecord* block = nullptr;
  };

  // `pageable`: where pageable_fallback gets its memory; null without it.
  Impl(const AllocatorOptions& options, std::shared_ptr<HostMemorySource> source,
       std::shared_ptr<HostMemorySource> pageable, HostRam ram)
      : options_(options),
        largest_chunk_bytes_(std::max(kLargestChunkBytes, options.segment_bytes)),
        watermark_(options, std::move(ram)),
        pool_(std::make_shared<SegmentPool>(std::move(source), /*pinned=*/true, options)) {
    if (pageable != nullptr) {
      AllocatorOptions pageable_options = options;
      pageable_options.max_locked_bytes = UINT64_MAX;  // it locks nothing
      pageable_options.segment_bytes = AlignUp(
          std::min(options.segment_bytes, kPageableSegmentBytes), pageable->granularity_bytes());
      pageable_pool_ =
          std::make_shared<SegmentPool>(std::move(pageable), /*pinned=*/false, pageable_options);
    }
  }

  ~Impl() {
    SegmentPool::Abandon(std::move(pool_));
    if (pageable_pool_ != nullptr) SegmentPool::Abandon(std::move(pageable_pool_));
  }

  SegmentPool& pool() const { return *pool_; }
  bool InForkedChild() const { return origin_.InForkedChild(); }
  absl::Status ForkRefusal() const { return origin_.Refusal("this PinnedAllocator"); }

  // Of blocks that no free one fits.
  absl::StatusOr<Served> AllocateOnMiss(uint64_t size_bytes);
  absl::Status Reserve(uint64_t size_bytes);
  absl::StatusOr<uint64_t> Trim(uint64_t keep_bytes);
  AllocatorStats GetStats() const;

  // The error that Allocate and Reserve return, and its place in the statistics.
  absl::Status Fail(const char* verb, uint64_t size_bytes, const absl::Status& cause);

 private:
  // Who refused a growth: each has its own remedy.
  enum class Refusal { kNone, kLimit, kWatermark, kSource };
  struct Growth {
    absl::Status status = absl::OkStatus();
    Refusal refusal = Refusal::kNone;
    BlockRecord* block = nullptr;
  };

  // A block that was released and whose tickets are done, or get done soon. Null if none fits.
  BlockRecord* TakeDeferred(SegmentPool& pool, uint64_t size_bytes);

  // Adds a segment with room for a block of `size_bytes`, and takes that. A block that came free
  // while other threads grew does as well.
  Growth GrowInTurn(SegmentPool& pool, uint64_t size_bytes);
  Growth Grow(SegmentPool& pool, uint64_t size_bytes);

  // Adds a segment of `wished_bytes`, or of less where the limit or the host's RAM has no more
  // room, down to `least_bytes`; takes a block of `size_bytes` from it (0: none).
  Growth AddSegment(SegmentPool& pool, uint64_t wished_bytes, uint64_t least_bytes,
                    uint64_t size_bytes, RamWatermark::Wait wait);
  Growth TryGrow(SegmentPool& pool, uint64_t segment_bytes, uint64_t size_bytes,
                 RamWatermark::Wait wait);

  // Sees to it that a refused growth of `segment_bytes` may pass, with cached segments if those are
  // needed and enough. Returns the bytes that it may take then; 0 if it is refused for good.
  uint64_t MakeRoom(SegmentPool& pool, Refusal refusal, uint64_t segment_bytes);

  void CountRefusal(Refusal refusal);

  const ForkOrigin origin_;
  const AllocatorOptions options_;
  const uint64_t largest_chunk_bytes_;
  RamWatermark watermark_;
  std::shared_ptr<SegmentPool> pool_;
  std::shared_ptr<SegmentPool> pageable_pool_;  // null without pageable_fallback
};

absl::StatusOr<PinnedAllocator::Impl::Served> PinnedAllocator::Impl::AllocateOnMiss(
    uint64_t size_bytes) {
  if (BlockRecord* block = TakeDeferred(*pool_, size_bytes); block != nullptr) {
    return Served{pool_.get(), block};
  }
  Growth growth = GrowInTurn(*pool_, size_bytes);
  if (growth.status.ok()) return Served{pool_.get(), growth.block};
  CountRefusal(growth.refusal);
  const bool not_pinnable = growth.refusal == Refusal::kLimit || growth.refusal == Refusal::kSource;
  if (pageable_pool_ == nullptr || !not_pinnable) return growth.status;

  BlockRecord* block = pageable_pool_->TryAllocate(size_bytes);
  if (block == nullptr) block = TakeDeferred(*pageable_pool_, size_bytes);
  if (block == nullptr) {
    growth = GrowInTurn(*pageable_pool_, size_bytes);
    if (!growth.status.ok()) return growth.status;
    block = growth.block;
  }
  return Served{pageable_pool_.get(), block};
}

BlockRecord* PinnedAllocator::Impl::TakeDeferred(SegmentPool& pool, uint64_t size_bytes) {
  const bool some_left = pool.PollDeferred();
  BlockRecord* block = pool.TryAllocate(size_bytes);
  if (block != nullptr) {
    pool.Count(&AllocatorStats::polled_hits);
  } else if (some_left && options_.max_wait_for_deferred > absl::ZeroDuration()) {
    pool.Count(&AllocatorStats::waits_for_deferred);
    block = pool.WaitForDeferred(size_bytes, options_.max_wait_for_deferred);
    if (block != nullptr) pool.Count(&AllocatorStats::waited_hits);
  }
  return block;
}

PinnedAllocator::Impl::Growth PinnedAllocator::Impl::GrowInTurn(SegmentPool& pool,
                                                                uint64_t size_bytes) {
  const internal::TurnHolder turn(pool.growth_turn());
  // Another thread may have had the turn, and grown.
  if (BlockRecord* block = pool.TryAllocate(size_bytes); block != nullptr) return {.block = block};
  return Grow(pool, size_bytes);
}

PinnedAllocator::Impl::Growth PinnedAllocator::Impl::Grow(SegmentPool& pool, uint64_t size_bytes) {
  const uint64_t least_bytes = pool.LeastSegmentBytes(size_bytes);
  const uint64_t wished_bytes = std::max(least_bytes, pool.segment_bytes());
  Growth growth =
      AddSegment(pool, wished_bytes, least_bytes, size_bytes, RamWatermark::Wait::kForOthers);
  if (growth.refusal == Refusal::kNone) return growth;
  const uint64_t room = MakeRoom(pool, growth.refusal, least_bytes);
  // Meanwhile somebody may have released a block.
  if (BlockRecord* block = pool.TryAllocate(size_bytes); block != nullptr) return {.block = block};
  // A source was not asked for less yet.
  const bool ask_for_less = growth.refusal == Refusal::kSource && least_bytes < wished_bytes;
  if (room == 0 && !ask_for_less) return growth;
  pool.Count(&AllocatorStats::growth_retries);
  const uint64_t second_bytes = std::max(least_bytes, std::min(room, pool.segment_bytes()));
  growth = AddSegment(pool, second_bytes, least_bytes, size_bytes, RamWatermark::Wait::kNo);
  if (growth.refusal == Refusal::kSource && least_bytes < second_bytes) {
    growth = AddSegment(pool, least_bytes, least_bytes, size_bytes, RamWatermark::Wait::kNo);
  }
  return growth;
}

PinnedAllocator::Impl::Growth PinnedAllocator::Impl::AddSegment(SegmentPool& pool,
                                                                uint64_t wished_bytes,
                                                                uint64_t least_bytes,
                                                                uint64_t size_bytes,
                                                                RamWatermark::Wait wait) {
  const uint64_t granularity_bytes = pool.source().granularity_bytes();
  uint64_t segment_bytes =
      std::min(wished_bytes, AlignDown(pool.BytesToLimit(), granularity_bytes));
  while (true) {
    segment_bytes = std::max(segment_bytes, least_bytes);
    Growth growth = TryGrow(pool, segment_bytes, size_bytes, wait);
    if (growth.refusal != Refusal::kWatermark || segment_bytes == least_bytes) return growth;
    segment_bytes = AlignDown(segment_bytes / kNextSmallerSegment, granularity_bytes);
    wait = RamWatermark::Wait::kNo;
  }
}

PinnedAllocator::Impl::Growth PinnedAllocator::Impl::TryGrow(SegmentPool& pool,
                                                             uint64_t segment_bytes,
                                                             uint64_t size_bytes,
                                                             RamWatermark::Wait wait) {
  if (absl::Status status = pool.BeginGrowth(segment_bytes); !status.ok()) {
    return {.status = std::move(status), .refusal = Refusal::kLimit};
  }
  absl::Cleanup cancel = [&] { pool.CancelGrowth(segment_bytes); };
  absl::StatusOr<RamWatermark::Growth> admitted = watermark_.AdmitGrowth(segment_bytes, wait);
  if (!admitted.ok()) return {.status = admitted.status(), .refusal = Refusal::kWatermark};
  HostMemorySource& source = pool.source();
  const internal::Stopwatch stopwatch;
  const absl::StatusOr<HostSegment> segment = source.Allocate(segment_bytes);
  pool.CountPinCall(segment.ok(), stopwatch.Elapsed());
  if (!segment.ok()) {
    const absl::Status status(
        segment.status().code(),
        absl::StrCat(source.name(), " failed to provide ", HumanBytes(segment_bytes), ": ",
                     segment.status().message()));
    // Other codes mean that the source is broken: making room does not help.
    const bool exhausted = absl::IsResourceExhausted(status);
    return {.status = status, .refusal = exhausted ? Refusal::kSource : Refusal::kNone};
  }
  PINION_CHECK(segment->size_bytes == segment_bytes &&
               reinterpret_cast<uintptr_t>(segment->data) % source.granularity_bytes() == 0)
      << source.name() << " returned " << segment->size_bytes << " bytes at " << segment->data
      << " for a request of " << segment_bytes << " aligned to " << source.granularity_bytes();
  std::move(cancel).Cancel();
  BlockRecord* const block = pool.FinishGrowth(*segment, size_bytes);
  if (block != nullptr && segment_bytes > largest_chunk_bytes_) {
    // Older oversized segments go back: a run whose longest block keeps growing would otherwise
    // lock the sum of all the maxima that it ever had.
    pool.GiveBack({.bytes = segment_bytes, .longer_than_bytes = largest_chunk_bytes_});
  }
  return {.block = block};
}

uint64_t PinnedAllocator::Impl::MakeRoom(SegmentPool& pool, Refusal refusal,
                                         uint64_t segment_bytes) {
  uint64_t missing_bytes = 0;
  switch (refusal) {
    case Refusal::kNone:
      return 0;
    case Refusal::kLimit:
      missing_bytes = segment_bytes - std::min(segment_bytes, pool.BytesToLimit());
      break;
    case Refusal::kWatermark:
      missing_bytes = watermark_.BytesToGiveBack(segment_bytes);
      // A host that is full gets what there is, for itself.
      if (watermark_.level() == RamLevel::kHigh) {
        return pool.GiveBack({.bytes = missing_bytes}).bytes;
      }
      break;
    case Refusal::kSource:
      return pool.GiveBack({}).bytes;
  }
  if (missing_bytes == 0) return segment_bytes;  // others have made room meanwhile
  return pool.GiveBack({.bytes = missing_bytes, .all_or_none = true}).bytes;
}

void PinnedAllocator::Impl::CountRefusal(Refusal refusal) {
  if (refusal == Refusal::kLimit) pool_->Count(&AllocatorStats::limit_refusals);
  if (refusal == Refusal::kWatermark) pool_->Count(&AllocatorStats::watermark_refusals);
  if (refusal == Refusal::kSource) pool_->Count(&AllocatorStats::source_refusals);
}

absl::Status PinnedAllocator::Impl::Reserve(uint64_t size_bytes) {
  const uint64_t granularity_bytes = pool_->source().granularity_bytes();
  pool_->PollDeferred();
  const internal::TurnHolder turn(pool_->growth_turn());
  auto wait = RamWatermark::Wait::kForOthers;
  while (true) {
    const uint64_t free_bytes = pool_->RoomForLargeBlocks();
    if (free_bytes >= size_bytes) return absl::OkStatus();
    const uint64_t missing_bytes =
        AlignUp(std::min(size_bytes - free_bytes, largest_chunk_bytes_), granularity_bytes);
    const uint64_t limit_bytes = AlignDown(pool_->BytesToLimit(), granularity_bytes);
    const uint64_t least_bytes = std::min(
        missing_bytes, std::max(granularity_bytes, std::min(limit_bytes, kLeastReservedBytes)));
    const Growth growth = AddSegment(*pool_, missing_bytes, least_bytes, /*size_bytes=*/0, wait);
    wait = RamWatermark::Wait::kNo;
    if (!growth.status.ok()) {
      CountRefusal(growth.refusal);
      return growth.status;
    }
  }
}

absl::StatusOr<uint64_t> PinnedAllocator::Impl::Trim(uint64_t keep_bytes) {
  watermark_.Observe();
  pool_->PollDeferred();
  const uint64_t locked_bytes = pool_->locked_bytes();
  SegmentPool::GivenBack given =
      pool_->GiveBack({.bytes = locked_bytes - std::min(locked_bytes, keep_bytes)});
  if (pageable_pool_ != nullptr) {
    pageable_pool_->PollDeferred();
    const SegmentPool::GivenBack pageable = pageable_pool_->GiveBack({});
    given.bytes += pageable.bytes;
    given.status.Update(pageable.status);
  }
  PINION_RETURN_IF_ERROR(given.status);
  return given.bytes;
}

AllocatorStats PinnedAllocator::Impl::GetStats() const {
  AllocatorStats stats = pool_->GetStats();
  const RamWatermark::Counts counts = watermark_.counts();
  stats.watermark_warnings = counts.warnings;
  stats.growth_waits = counts.waits;
  if (pageable_pool_ != nullptr) {
    const AllocatorStats pageable = pageable_pool_->GetStats();
    stats.pageable_bytes = pageable.locked_bytes;
    stats.pageable_allocations = pageable.allocations;
    stats.allocations += pageable.allocations;
  }
  return stats;
}

absl::Status PinnedAllocator::Impl::Fail(const char* verb, uint64_t size_bytes,
                                         const absl::Status& cause) {
  pool_->Count(&AllocatorStats::failures);
  const AllocatorStats stats = GetStats();
  return absl::Status(
      cause.code(), absl::StrCat("cannot ", verb, " ", HumanBytes(size_bytes), " (", size_bytes,
                                 " bytes) of pinned memory: ", cause.message(), ". ",
                                 HumanBytes(stats.locked_bytes.current), " are locked: ",
                                 HumanBytes(stats.booked_bytes.current), " in use, ",
                                 HumanBytes(stats.deferred_bytes.current), " waiting for copies, ",
                                 HumanBytes(stats.cached_bytes.current), " cached"));
}

absl::StatusOr<std::shared_ptr<PinnedAllocator>> PinnedAllocator::Create(
    const AllocatorOptions& options, std::shared_ptr<HostMemorySource> source, HostRam ram) {
  PINION_RETURN_IF_ERROR(options.Validate());
  if (source == nullptr) {
    return absl::InvalidArgumentError("PinnedAllocator::Create: source is null");
  }
  const uint64_t granularity_bytes = source->granularity_bytes();
  if (!IsPowerOfTwo(granularity_bytes) || granularity_bytes < kPageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(source->name(), "'s granularity_bytes is ", granularity_bytes,
                     "; it must be a power of two and at least ", kPageBytes));
  }
  if (options.segment_bytes % granularity_bytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "AllocatorOptions::segment_bytes is ", options.segment_bytes,
        "; it must be a multiple of the granularity of ", source->name(), ", ", granularity_bytes));
  }
  if (options.max_locked_bytes < granularity_bytes && !options.pageable_fallback) {
    return absl::InvalidArgumentError(
        absl::StrCat("AllocatorOptions::max_locked_bytes is ", options.max_locked_bytes,
                     "; nothing could be allocated: it must be at least the granularity of ",
                     source->name(), ", ", granularity_bytes, ", or pageable_fallback be set"));
  }
  if (options.alignment_bytes > granularity_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "AllocatorOptions::alignment_bytes is ", options.alignment_bytes,
        "; it must be at most the granularity of ", source->name(), ", ", granularity_bytes));
  }
  std::shared_ptr<HostMemorySource> pageable;
  if (options.pageable_fallback) {
    PINION_ASSIGN_OR_RETURN(pageable, MmapSource::Create());
    if (options.alignment_bytes > pageable->granularity_bytes()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "AllocatorOptions::alignment_bytes is ", options.alignment_bytes,
          "; with pageable_fallback it must be at most ", pageable->granularity_bytes()));
    }
  }
  return std::shared_ptr<PinnedAllocator>(new PinnedAllocator(
      std::make_unique<Impl>(options, std::move(source), std::move(pageable), std::move(ram))));
}

PinnedAllocator::PinnedAllocator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PinnedAllocator::~PinnedAllocator() = default;

// First of all: a child of fork() may find a lock taken for ever.
absl::StatusOr<PinnedBlock> PinnedAllocator::Allocate(uint64_t size_bytes) {
  if (impl_->InForkedChild()) return impl_->ForkRefusal();
  if (size_bytes == 0 || size_bytes > internal::kMaxBlockBytes) {
    return impl_->Fail("allocate", size_bytes,
                       absl::InvalidArgumentError("size_bytes must be from 1 to 2^47"));
  }
  if (BlockRecord* block = impl_->pool().TryAllocate(size_bytes); block != nullptr) {
    return PinnedBlock(&impl_->pool(), block);
  }
  const absl::StatusOr<Impl::Served> served = impl_->AllocateOnMiss(size_bytes);
  if (!served.ok()) return impl_->Fail("allocate", size_bytes, served.status());
  return PinnedBlock(served->pool, served->block);
}

absl::Status PinnedAllocator::Reserve(uint64_t size_bytes) {
  if (impl_->InForkedChild()) return impl_->ForkRefusal();
  const absl::Status status = impl_->Reserve(size_bytes);
  return status.ok() ? status : impl_->Fail("reserve", size_bytes, status);
}

absl::StatusOr<uint64_t> PinnedAllocator::Trim(uint64_t keep_bytes) {
  if (impl_->InForkedChild()) return impl_->ForkRefusal();
  return impl_->Trim(keep_bytes);
}

AllocatorStats PinnedAllocator::GetStats() const {
  return impl_->InForkedChild() ? AllocatorStats() : impl_->GetStats();
}

}  // namespace pinion
