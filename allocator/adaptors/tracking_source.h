// A source that remembers who asked for what, to find out who keeps it.
//
//   auto source = std::make_shared<TrackingSource>(upstream);
//   ...
//   std::cerr << source->Report();    // each segment that is held, and the stack that asked for it
//
// What is still held when it is destroyed is logged as a leak. Names of functions are those that
// the binary's symbol table has.
//
// Thread safety: thread-safe. A stack trace costs some microseconds, which pinning does not notice.

#ifndef PINION_ALLOCATOR_ADAPTORS_TRACKING_SOURCE_H_
#define PINION_ALLOCATOR_ADAPTORS_TRACKING_SOURCE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/adaptors/source_adaptor.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion {

class TrackingSource final : public SourceAdaptor {
 public:
  using SourceAdaptor::SourceAdaptor;
  ~TrackingSource() override;

  uint64_t held_bytes() const;
  // A few lines per segment, those of the same stack together, the largest sum first.
  std::string Report() const;

  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override;
  // Dies if `segment` is not held: freed before, or another source's.
  absl::Status Free(const HostSegment& segment) override;

 private:
  using Stack = std::vector<void*>;
  struct Held {
    uint64_t size_bytes = 0;
    Stack stack;
  };

  mutable Mutex mu_;
  std::map<void*, Held> held_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_ADAPTORS_TRACKING_SOURCE_H_
