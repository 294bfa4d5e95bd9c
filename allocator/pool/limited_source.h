// The source of a pool's segments, under a limit and with statistics.
//
//   PINION_RETURN_IF_ERROR(source.Book(kGiB));   // the limit first, because that is cheap
//   PINION_ASSIGN_OR_RETURN(HostSegment segment, source.Pin(kGiB));
//   ...
//   source.Unpin({segment});
//
// Thread safety: thread-safe. The source is called without a lock.

#ifndef PINION_ALLOCATOR_POOL_LIMITED_SOURCE_H_
#define PINION_ALLOCATOR_POOL_LIMITED_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion::internal {

class LimitedSource {
 public:
  LimitedSource(std::shared_ptr<HostMemorySource> source, uint64_t max_bytes);

  std::string name() const { return source_->name(); }
  bool pinned() const { return source_->pinned(); }
  uint64_t granularity_bytes() const { return source_->granularity_bytes(); }
  bool JoinsAt(const void* border) const { return source_->JoinsAt(border); }

  // Books `bytes` of the limit for one Pin. ResourceExhausted if they do not fit. Call Unbook if
  // Pin fails.
  absl::Status Book(uint64_t bytes);
  void Unbook(uint64_t bytes);
  uint64_t BytesToLimit() const;

  // Errors are those of HostMemorySource::Allocate, with the source's name. Internal if the source
  // returns memory of another size or alignment, or none; it gets that memory back.
  absl::StatusOr<HostSegment> Pin(uint64_t bytes);

  // Frees segments and their bytes of the limit. A segment that the source fails to free is logged
  // and leaked. The limit keeps counting it, because it may still be pinned.
  struct GivenBack {
    uint64_t bytes = 0;   // without leaked bytes
    absl::Status status;  // the first error
  };
  GivenBack Unpin(const std::vector<HostSegment>& segments);

  SourceStats stats() const;

 private:
  // Gives back a segment that is not what Pin asked for. Returns the error that says so.
  absl::Status Refuse(const HostSegment& segment, uint64_t bytes);
  void LogLeak(const HostSegment& segment, const absl::Status& why) const;

  const std::shared_ptr<HostMemorySource> source_;
  const uint64_t max_bytes_;

  mutable Mutex mu_;
  // From Book until the source has freed the bytes. At most the limit.
  uint64_t held_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  SourceStats stats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_LIMITED_SOURCE_H_
