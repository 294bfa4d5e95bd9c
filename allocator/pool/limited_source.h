// Where the segments of a pool come from: a source, under a limit, with its calls counted.
//
//   PINION_RETURN_IF_ERROR(source.Book(kGiB));   // the limit first: it costs nothing to ask
//   PINION_ASSIGN_OR_RETURN(HostSegment segment, source.Pin(kGiB));
//   ...
//   source.Unpin({segment});
//
// Thread safety: thread-safe. The source is called with no lock held.

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

  // Takes `bytes` of what the limit leaves, for one Pin. ResourceExhausted if they do not fit.
  // Whoever gets no segment for them unbooks them.
  absl::Status Book(uint64_t bytes);
  void Unbook(uint64_t bytes);
  uint64_t BytesToLimit() const;

  // Errors as those of HostMemorySource::Allocate; the message names the source.
  absl::StatusOr<HostSegment> Pin(uint64_t bytes);

  // Gives segments back, and their bytes to the limit. What the source fails to free is logged and
  // lost: it may still be pinned, so the limit goes on counting it.
  struct GivenBack {
    uint64_t bytes = 0;   // without what is lost
    absl::Status status;  // the first error
  };
  GivenBack Unpin(const std::vector<HostSegment>& segments);

  SourceStats stats() const;

 private:
  const std::shared_ptr<HostMemorySource> source_;
  const uint64_t max_bytes_;

  mutable Mutex mu_;
  // From the booking until the source has freed them; never more than the limit.
  uint64_t held_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  SourceStats stats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_LIMITED_SOURCE_H_
