// A source that gives no more than so many bytes at a time, whoever asks. What one allocator may
// lock is AllocatorOptions::max_locked_bytes; this is for several that share a source.
//
//   auto source = std::make_shared<LimitingSource>(upstream, 4 * kGiB);
//
// Thread safety: thread-safe, without a lock; threads that ask at once do not pass the limit.

#ifndef PINION_ALLOCATOR_ADAPTORS_LIMITING_SOURCE_H_
#define PINION_ALLOCATOR_ADAPTORS_LIMITING_SOURCE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/adaptors/source_adaptor.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion {

class LimitingSource final : public SourceAdaptor {
 public:
  LimitingSource(std::shared_ptr<HostMemorySource> upstream, uint64_t limit_bytes)
      : SourceAdaptor(std::move(upstream)), limit_bytes_(limit_bytes) {}

  // Given and not freed yet, or about to be given.
  uint64_t taken_bytes() const { return taken_bytes_; }

  // ResourceExhausted above the limit.
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    uint64_t taken = taken_bytes_;
    do {
      if (taken > limit_bytes_ || size_bytes > limit_bytes_ - taken) {
        return absl::ResourceExhaustedError(
            absl::StrCat(HumanBytes(size_bytes), " more than ", HumanBytes(taken),
                         " would exceed the source's limit, ", HumanBytes(limit_bytes_)));
      }
    } while (!taken_bytes_.compare_exchange_weak(taken, taken + size_bytes));
    absl::StatusOr<HostSegment> segment = SourceAdaptor::Allocate(size_bytes);
    if (!segment.ok()) taken_bytes_ -= size_bytes;
    return segment;
  }

  // What could not be freed stays taken.
  absl::Status Free(const HostSegment& segment) override {
    absl::Status status = SourceAdaptor::Free(segment);
    if (status.ok()) taken_bytes_ -= segment.size_bytes;
    return status;
  }

 private:
  const uint64_t limit_bytes_;
  std::atomic<uint64_t> taken_bytes_{0};
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_ADAPTORS_LIMITING_SOURCE_H_
