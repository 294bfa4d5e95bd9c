#include "pinion/allocator/pinned_allocator.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/heap/size_class.h"
#include "pinion/allocator/pool/grower.h"
#include "pinion/allocator/pool/limited_source.h"
#include "pinion/allocator/pool/segment_pool.h"
#include "pinion/allocator/ram/host_ledger.h"
#include "pinion/allocator/ram/ram_watermark.h"
#include "pinion/allocator/sources/mmap_source.h"

namespace pinion {
namespace {

using internal::BlockRecord;
using internal::Grower;

constexpr uint64_t kPageBytes = 4096;

// Pageable memory costs only its pages, which are touched at once.
constexpr uint64_t kPageableSegmentBytes = 64 * kMiB;

bool IsPossible(uint64_t size_bytes) {
  return 0 < size_bytes && size_bytes <= internal::kMaxBlockBytes;
}

absl::Status ImpossibleSize(const char* range) {
  return absl::InvalidArgumentError(absl::StrCat("size_bytes must be ", range));
}

}  // namespace

struct PinnedAllocator::Impl {
  // `pageable` is the source for pageable_fallback, or null.
  Impl(const AllocatorOptions& options, std::shared_ptr<HostMemorySource> source,
       std::shared_ptr<HostMemorySource> pageable, HostRam ram)
      : watermark(options, std::move(ram)), pinned(std::move(source), options, watermark) {
    if (pageable == nullptr) return;
    AllocatorOptions pageable_options = options;
    pageable_options.max_locked_bytes = UINT64_MAX;  // it locks nothing
    pageable_options.segment_bytes = AlignUp(std::min(options.segment_bytes, kPageableSegmentBytes),
                                             pageable->granularity_bytes());
    fallback.emplace(std::move(pageable), pageable_options, watermark);
  }

  const ForkOrigin origin;
  RamWatermark watermark;
  Grower pinned;
  std::optional<Grower> fallback;  // with pageable_fallback
  std::atomic<uint64_t> failures = 0;
};

absl::StatusOr<std::shared_ptr<PinnedAllocator>> PinnedAllocator::Create(
    const AllocatorOptions& options, std::shared_ptr<HostMemorySource> source, HostRam ram) {
  PINION_RETURN_IF_ERROR(options.Validate());
  if (source == nullptr) {
    return absl::InvalidArgumentError(
        "PinnedAllocator::Create: source is null; pass one, such as MmapSource::Create() or a "
        "device's pinned_source()");
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
                     source->name(), ", ", granularity_bytes, " (", HumanBytes(granularity_bytes),
                     "), or pageable_fallback be set"));
  }
  if (options.alignment_bytes > granularity_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "AllocatorOptions::alignment_bytes is ", options.alignment_bytes,
        "; it must be at most the granularity of ", source->name(), ", ", granularity_bytes));
  }
  if (!options.ledger_directory.empty()) {
    absl::StatusOr<HostLedger> ledger = HostLedger::InDirectory(options.ledger_directory);
    if (!ledger.ok()) {
      return absl::Status(ledger.status().code(),
                          absl::StrCat("AllocatorOptions::ledger_directory is ",
                                       options.ledger_directory, ": ", ledger.status().message()));
    }
    ram.ledger = *std::move(ledger);
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

// The check comes first, because a child of fork() may find a lock taken for ever.
absl::StatusOr<PinnedBlock> PinnedAllocator::Allocate(uint64_t size_bytes) {
  if (!impl_->origin.InForkedChild() && IsPossible(size_bytes)) [[likely]] {
    BlockRecord* const block = impl_->pinned.pool().TryAllocate(size_bytes);
    if (block != nullptr) [[likely]]
      return PinnedBlock(block);
  }
  return AllocateOrRefuse(size_bytes);
}

absl::StatusOr<PinnedBlock> PinnedAllocator::AllocateOrRefuse(uint64_t size_bytes) {
  PINION_RETURN_IF_ERROR(CheckFork());
  if (!IsPossible(size_bytes)) {
    return Fail("allocate", size_bytes, ImpossibleSize("from 1 to 2^47"));
  }
  Grower::Result result = impl_->pinned.AllocateOnMiss(size_bytes);
  const bool not_pinnable =
      result.refusal == Grower::Refusal::kLimit || result.refusal == Grower::Refusal::kSource;
  if (not_pinnable && impl_->fallback.has_value()) {
    Grower& fallback = *impl_->fallback;
    BlockRecord* const block = fallback.pool().TryAllocate(size_bytes);
    if (block != nullptr) return PinnedBlock(block);
    result = fallback.AllocateOnMiss(size_bytes);
  }
  if (!result.status.ok()) return Fail("allocate", size_bytes, result.status);
  return PinnedBlock(result.block);
}

absl::Status PinnedAllocator::Reserve(uint64_t size_bytes) {
  PINION_RETURN_IF_ERROR(CheckFork());
  const absl::Status status = size_bytes <= internal::kMaxBlockBytes
                                  ? impl_->pinned.Reserve(size_bytes)
                                  : ImpossibleSize("at most 2^47");
  return status.ok() ? status : Fail("reserve", size_bytes, status);
}

absl::StatusOr<uint64_t> PinnedAllocator::Trim(uint64_t keep_bytes) {
  PINION_RETURN_IF_ERROR(CheckFork());
  impl_->watermark.Observe();
  internal::LimitedSource::GivenBack given = impl_->pinned.Trim(keep_bytes);
  if (impl_->fallback.has_value()) {
    const internal::LimitedSource::GivenBack pageable = impl_->fallback->Trim(0);
    given.bytes += pageable.bytes;
    given.status.Update(pageable.status);
  }
  PINION_RETURN_IF_ERROR(given.status);
  return given.bytes;
}

bool PinnedAllocator::Owns(const void* address) const {
  if (impl_->origin.InForkedChild()) return false;
  return impl_->pinned.pool().Owns(address) ||
         (impl_->fallback.has_value() && impl_->fallback->pool().Owns(address));
}

AllocatorStats PinnedAllocator::GetStats() const {
  if (impl_->origin.InForkedChild()) return AllocatorStats();
  AllocatorStats stats = impl_->pinned.GetStats();
  stats.pinned = impl_->pinned.pool().pinned();
  stats.failures = impl_->failures;
  const RamWatermark::Counts counts = impl_->watermark.counts();
  stats.watermark_warnings = counts.warnings;
  stats.growth_waits = counts.waits;
  if (impl_->fallback.has_value()) {
    const AllocatorStats pageable = impl_->fallback->GetStats();
    stats.pageable_bytes = pageable.locked_bytes;
    stats.pageable_allocations = pageable.allocations;
    stats.allocations += pageable.allocations;
  }
  return stats;
}

absl::Status PinnedAllocator::CheckFork() const {
  return impl_->origin.InForkedChild() ? impl_->origin.Refusal("this PinnedAllocator")
                                       : absl::OkStatus();
}

absl::Status PinnedAllocator::Fail(const char* verb, uint64_t size_bytes,
                                   const absl::Status& cause) {
  ++impl_->failures;
  const AllocatorStats stats = GetStats();
  return absl::Status(
      cause.code(),
      absl::StrCat("cannot ", verb, " ", HumanBytes(size_bytes), " (", size_bytes, " bytes) of ",
                   stats.pinned ? "pinned" : "pageable", " memory: ", cause.message(), ". ",
                   HumanBytes(stats.locked_bytes.current), " are ",
                   stats.pinned ? "locked" : "held", ": ", HumanBytes(stats.booked_bytes.current),
                   " in use, ", HumanBytes(stats.deferred_bytes.current), " waiting for copies, ",
                   HumanBytes(stats.cached_bytes.current), " cached"));
}

}  // namespace pinion
