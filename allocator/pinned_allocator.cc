#include "pinion/allocator/pinned_allocator.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/ram_watermark.h"
#include "pinion/allocator/segment.h"
#include "pinion/allocator/segment_pool.h"
#include "pinion/allocator/size_class.h"

namespace pinion {
namespace {

using internal::BlockRecord;
using internal::SegmentPool;

// Small blocks are few bytes in all: a chunk of them is no larger than a large block's rounding.
constexpr uint64_t kSmallSegmentBytes = 2 * kMiB;

constexpr uint64_t kPageBytes = 4096;

}  // namespace

class PinnedAllocator::Impl {
 public:
  Impl(const AllocatorOptions& options, std::shared_ptr<HostMemorySource> source, HostRam ram)
      : options_(options),
        granularity_bytes_(source->granularity_bytes()),
        watermark_(options, std::move(ram)),
        pool_(std::make_shared<SegmentPool>(std::move(source), options.max_locked_bytes)) {}

  ~Impl() { SegmentPool::Abandon(std::move(pool_)); }

  SegmentPool& pool() const { return *pool_; }

  absl::StatusOr<BlockRecord*> AllocateOnMiss(uint64_t size_bytes);
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

  // One attempt to add a segment, and to take a block of `size_bytes` from it (0: none).
  Growth TryGrow(uint64_t segment_bytes, bool small, uint64_t size_bytes);

  // Gives cached segments back so that a refused growth may pass. Returns the bytes given back.
  uint64_t MakeRoom(Refusal refusal, uint64_t segment_bytes);

  void CountRefusal(Refusal refusal);

  const AllocatorOptions options_;
  const uint64_t granularity_bytes_;
  RamWatermark watermark_;
  std::shared_ptr<SegmentPool> pool_;
};

absl::StatusOr<BlockRecord*> PinnedAllocator::Impl::AllocateOnMiss(uint64_t size_bytes) {
  if (pool_->PollDeferred()) {
    if (BlockRecord* block = pool_->TryAllocate(size_bytes); block != nullptr) return block;
    if (options_.max_wait_for_deferred > absl::ZeroDuration()) {
      pool_->Count(&AllocatorStats::waits_for_deferred);
      const absl::Time deadline = absl::Now() + options_.max_wait_for_deferred;
      BlockRecord* block = pool_->WaitForDeferred(size_bytes, deadline);
      if (block != nullptr) return block;
    }
  }

  const uint64_t booked_bytes = SegmentPool::BookedBytes(size_bytes);
  const bool small = internal::IsSmallClass(booked_bytes);
  const uint64_t least_bytes = AlignUp(booked_bytes, granularity_bytes_);
  const uint64_t chunk_bytes =
      small ? std::min(options_.segment_bytes, AlignUp(kSmallSegmentBytes, granularity_bytes_))
            : options_.segment_bytes;
  const uint64_t wished_bytes = std::max(least_bytes, chunk_bytes);

  Growth growth = TryGrow(wished_bytes, small, size_bytes);
  if (growth.refusal != Refusal::kNone) {
    const uint64_t room = MakeRoom(growth.refusal, least_bytes);
    // Meanwhile somebody else may have released a block, or grown.
    if (BlockRecord* block = pool_->TryAllocate(size_bytes); block != nullptr) return block;
    if (room > 0 || least_bytes < wished_bytes) {
      growth = TryGrow(least_bytes, small, size_bytes);
    }
  }
  if (growth.status.ok()) return growth.block;
  CountRefusal(growth.refusal);
  return growth.status;
}

PinnedAllocator::Impl::Growth PinnedAllocator::Impl::TryGrow(uint64_t segment_bytes, bool small,
                                                             uint64_t size_bytes) {
  if (absl::Status status = pool_->BeginGrowth(segment_bytes); !status.ok()) {
    return {.status = std::move(status), .refusal = Refusal::kLimit};
  }
  absl::StatusOr<RamWatermark::Growth> admitted = watermark_.AdmitGrowth(segment_bytes);
  if (!admitted.ok()) {
    pool_->CancelGrowth(segment_bytes);
    return {.status = admitted.status(), .refusal = Refusal::kWatermark};
  }
  const absl::Time start = absl::Now();
  const absl::StatusOr<HostSegment> segment = pool_->source().Allocate(segment_bytes);
  pool_->CountPinCall(segment.ok(), absl::Now() - start);
  if (!segment.ok()) {
    pool_->CancelGrowth(segment_bytes);
    const absl::Status status(
        segment.status().code(),
        absl::StrCat(pool_->source().name(), " failed to provide ", HumanBytes(segment_bytes), ": ",
                     segment.status().message()));
    // Other codes mean that the source is broken: making room does not help.
    const bool exhausted = absl::IsResourceExhausted(status);
    return {.status = status, .refusal = exhausted ? Refusal::kSource : Refusal::kNone};
  }
  PINION_CHECK(segment->size_bytes == segment_bytes &&
               reinterpret_cast<uintptr_t>(segment->data) % granularity_bytes_ == 0)
      << pool_->source().name() << " returned " << segment->size_bytes << " bytes at "
      << segment->data << " for a request of " << segment_bytes << " aligned to "
      << granularity_bytes_;
  return {.block = pool_->FinishGrowth(*segment, small, size_bytes)};
}

uint64_t PinnedAllocator::Impl::MakeRoom(Refusal refusal, uint64_t segment_bytes) {
  uint64_t bytes = 0;
  switch (refusal) {
    case Refusal::kNone:
      return 0;
    case Refusal::kLimit:
      bytes = pool_->BytesOverLimit(segment_bytes);
      break;
    case Refusal::kWatermark:
      bytes = watermark_.BytesToGiveBack(segment_bytes);
      break;
    case Refusal::kSource:
      bytes = UINT64_MAX;
      break;
  }
  return pool_->GiveBack(bytes).value_or(0);
}

void PinnedAllocator::Impl::CountRefusal(Refusal refusal) {
  if (refusal == Refusal::kLimit) pool_->Count(&AllocatorStats::limit_refusals);
  if (refusal == Refusal::kWatermark) pool_->Count(&AllocatorStats::watermark_refusals);
}

absl::Status PinnedAllocator::Impl::Reserve(uint64_t size_bytes) {
  while (true) {
    const uint64_t free_bytes = pool_->large_free_bytes();
    if (free_bytes >= size_bytes) return absl::OkStatus();
    const uint64_t missing_bytes =
        std::max(AlignUp(size_bytes - free_bytes, granularity_bytes_), kPageBytes);
    Growth growth = TryGrow(options_.segment_bytes, /*small=*/false, /*size_bytes=*/0);
    if (growth.refusal != Refusal::kNone && missing_bytes < options_.segment_bytes) {
      growth = TryGrow(missing_bytes, /*small=*/false, /*size_bytes=*/0);
    }
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
  return pool_->GiveBack(locked_bytes > keep_bytes ? locked_bytes - keep_bytes : 0);
}

AllocatorStats PinnedAllocator::Impl::GetStats() const {
  AllocatorStats stats = pool_->GetStats();
  const RamWatermark::Counts counts = watermark_.counts();
  stats.watermark_warnings = counts.warnings;
  stats.growth_waits = counts.waits;
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
  return std::shared_ptr<PinnedAllocator>(
      new PinnedAllocator(std::make_unique<Impl>(options, std::move(source), std::move(ram))));
}

PinnedAllocator::PinnedAllocator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PinnedAllocator::~PinnedAllocator() = default;

absl::StatusOr<PinnedBlock> PinnedAllocator::Allocate(uint64_t size_bytes) {
  if (size_bytes == 0 || size_bytes > internal::kMaxBlockBytes) {
    return impl_->Fail("allocate", size_bytes,
                       absl::InvalidArgumentError("size_bytes must be from 1 to 2^47"));
  }
  BlockRecord* block = impl_->pool().TryAllocate(size_bytes);
  if (block == nullptr) {
    absl::StatusOr<BlockRecord*> grown = impl_->AllocateOnMiss(size_bytes);
    if (!grown.ok()) return impl_->Fail("allocate", size_bytes, grown.status());
    block = *grown;
  }
  return PinnedBlock(&impl_->pool(), block);
}

absl::Status PinnedAllocator::Reserve(uint64_t size_bytes) {
  const absl::Status status = impl_->Reserve(size_bytes);
  return status.ok() ? status : impl_->Fail("reserve", size_bytes, status);
}

absl::StatusOr<uint64_t> PinnedAllocator::Trim(uint64_t keep_bytes) {
  return impl_->Trim(keep_bytes);
}

AllocatorStats PinnedAllocator::GetStats() const { return impl_->GetStats(); }

}  // namespace pinion
