// A source that takes its time, as pinning does: 0.1 to 1 s per GiB on real hosts.
//
//   DelayingSource::Delays delays;
//   delays.per_gib = absl::Milliseconds(400);
//   auto source = std::make_shared<DelayingSource>(upstream, delays);
//
// The delay after a free widens the moment in which an address is free, and perhaps somebody
// else's already, while the books of the one who freed it still have it (rmm#2304).
//
// Thread safety: thread-safe; threads wait at the same time.

#ifndef PINION_ALLOCATOR_ADAPTORS_DELAYING_SOURCE_H_
#define PINION_ALLOCATOR_ADAPTORS_DELAYING_SOURCE_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/allocator/adaptors/source_adaptor.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion {

class DelayingSource final : public SourceAdaptor {
 public:
  struct Delays {
    absl::Duration per_call = absl::ZeroDuration();    // of Allocate
    absl::Duration per_gib = absl::ZeroDuration();     // of Allocate, besides
    absl::Duration after_free = absl::ZeroDuration();  // of Free, once the memory is gone
  };

  DelayingSource(std::shared_ptr<HostMemorySource> upstream, const Delays& delays)
      : SourceAdaptor(std::move(upstream)), delays_(delays) {}

  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    absl::SleepFor(delays_.per_call + delays_.per_gib * (static_cast<double>(size_bytes) / kGiB));
    return SourceAdaptor::Allocate(size_bytes);
  }

  absl::Status Free(const HostSegment& segment) override {
    absl::Status status = SourceAdaptor::Free(segment);
    absl::SleepFor(delays_.after_free);
    return status;
  }

 private:
  const Delays delays_;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_ADAPTORS_DELAYING_SOURCE_H_
