// A HostMemorySource that forwards to another one: the base of sources that watch or change calls.
//
// Thread safety: thread-safe if the upstream source is. Ownership: shares the upstream source.

#ifndef PINION_TESTS_SUPPORT_SOURCE_ADAPTOR_H_
#define PINION_TESTS_SUPPORT_SOURCE_ADAPTOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion::testing {

class SourceAdaptor : public HostMemorySource {
 public:
  explicit SourceAdaptor(std::shared_ptr<HostMemorySource> upstream)
      : upstream_(std::move(upstream)) {
    PINION_CHECK(upstream_ != nullptr) << "a source adaptor without a source";
  }

  std::string name() const override { return upstream_->name(); }
  bool pinned() const override { return upstream_->pinned(); }
  uint64_t granularity_bytes() const override { return upstream_->granularity_bytes(); }
  bool JoinsAt(const void* border) const override { return upstream_->JoinsAt(border); }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    return upstream_->Allocate(size_bytes);
  }
  absl::Status Free(const HostSegment& segment) override { return upstream_->Free(segment); }

 private:
  const std::shared_ptr<HostMemorySource> upstream_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_SOURCE_ADAPTOR_H_
