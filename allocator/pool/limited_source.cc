#include "pinion/allocator/pool/limited_source.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/heap/hardening.h"

namespace pinion::internal {

LimitedSource::LimitedSource(std::shared_ptr<HostMemorySource> source, uint64_t max_bytes)
    : source_(std::move(source)), max_bytes_(max_bytes) {}

absl::Status LimitedSource::Book(uint64_t bytes) {
  MutexLock lock(mu_);
  if (bytes > max_bytes_ - held_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        pinned() ? "to lock " : "to take ", HumanBytes(bytes),
        " more would exceed max_locked_bytes, ", HumanBytes(max_bytes_), ": raise it"));
  }
  held_bytes_ += bytes;
  return absl::OkStatus();
}

void LimitedSource::Unbook(uint64_t bytes) {
  MutexLock lock(mu_);
  held_bytes_ -= bytes;
}

uint64_t LimitedSource::BytesToLimit() const {
  MutexLock lock(mu_);
  return max_bytes_ - held_bytes_;
}

absl::StatusOr<HostSegment> LimitedSource::Pin(uint64_t bytes) {
  const Stopwatch stopwatch;
  const absl::StatusOr<HostSegment> segment = source_->Allocate(bytes);
  const double ms = absl::ToDoubleMilliseconds(stopwatch.Elapsed());
  {
    MutexLock lock(mu_);
    ++stats_.pin_calls;
    if (!segment.ok()) ++stats_.pin_failures;
    stats_.pin_ms += ms;
    stats_.max_pin_ms = std::max(stats_.max_pin_ms, ms);
  }
  if (!segment.ok()) {
    return absl::Status(segment.status().code(),
                        absl::StrCat(name(), " failed to provide ", HumanBytes(bytes), ": ",
                                     segment.status().message()));
  }
  if (segment->data != nullptr && segment->size_bytes == bytes &&
      reinterpret_cast<uintptr_t>(segment->data) % granularity_bytes() == 0) {
    return segment;
  }
  return Refuse(*segment, bytes);
}

absl::Status LimitedSource::Refuse(const HostSegment& segment, uint64_t bytes) {
  absl::Status freed;
  if (segment.data != nullptr) freed = source_->Free(segment);
  if (!freed.ok()) LogLeak(segment, freed);
  {
    MutexLock lock(mu_);
    ++stats_.pin_failures;
    if (!freed.ok()) stats_.leaked_bytes += segment.size_bytes;
  }
  return absl::InternalError(
      absl::StrCat(name(), " returned ", segment.size_bytes, " bytes at 0x",
                   absl::Hex(reinterpret_cast<uintptr_t>(segment.data)), " for a request of ",
                   bytes, " aligned to ", granularity_bytes(),
                   ": correct the source; a source without memory returns ResourceExhausted"));
}

void LimitedSource::LogLeak(const HostSegment& segment, const absl::Status& why) const {
  PINION_LOG(kError) << name() << " failed to free " << HumanBytes(segment.size_bytes)
                     << ", which is leaked: " << why.ToString();
}

LimitedSource::GivenBack LimitedSource::Unpin(const std::vector<HostSegment>& segments) {
  GivenBack given;
  for (const HostSegment& segment : segments) {
    if (kHardened) CheckFreeSegment(segment);
    const Stopwatch stopwatch;
    const absl::Status status = source_->Free(segment);
    const double ms = absl::ToDoubleMilliseconds(stopwatch.Elapsed());
    if (!status.ok()) LogLeak(segment, status);
    given.status.Update(status);
    MutexLock lock(mu_);
    ++stats_.unpin_calls;
    stats_.unpin_ms += ms;
    stats_.max_unpin_ms = std::max(stats_.max_unpin_ms, ms);
    if (status.ok()) {
      given.bytes += segment.size_bytes;
      held_bytes_ -= segment.size_bytes;
    } else {
      stats_.leaked_bytes += segment.size_bytes;
    }
  }
  return given;
}

SourceStats LimitedSource::stats() const {
  MutexLock lock(mu_);
  return stats_;
}

}  // namespace pinion::internal
