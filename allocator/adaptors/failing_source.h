// A source that fails when it is told to, for tests of what a program does without pinned memory.
//
//   auto source = std::make_shared<FailingSource>(upstream);
//   source->FailAllocate(2);                            // the third call fails
//   source->FailAllocate(0, absl::StatusCode::kInternal);
//   source->FailEveryFree();
//
// To fail the k-th call for every k: run the program once, read calls(), and loop.
//
// Thread safety: thread-safe.

#ifndef PINION_ALLOCATOR_ADAPTORS_FAILING_SOURCE_H_
#define PINION_ALLOCATOR_ADAPTORS_FAILING_SOURCE_H_

#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/adaptors/source_adaptor.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion {

class FailingSource final : public SourceAdaptor {
 public:
  using SourceAdaptor::SourceAdaptor;

  // The call of Allocate with this number, counted from 0, fails with `code`.
  void FailAllocate(uint64_t call, absl::StatusCode code = absl::StatusCode::kResourceExhausted) {
    MutexLock lock(mu_);
    failing_[call] = code;
  }
  // Free fails from now on, and the memory is lost.
  void FailEveryFree() {
    MutexLock lock(mu_);
    fail_free_ = true;
  }

  // Calls of Allocate, failed ones included.
  uint64_t calls() const {
    MutexLock lock(mu_);
    return calls_;
  }

  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    {
      MutexLock lock(mu_);
      const auto failing = failing_.find(calls_++);
      if (failing != failing_.end()) return absl::Status(failing->second, "told to fail");
    }
    return SourceAdaptor::Allocate(size_bytes);
  }

  absl::Status Free(const HostSegment& segment) override {
    if (InForkedChild()) return absl::OkStatus();
    {
      MutexLock lock(mu_);
      if (fail_free_) return absl::InternalError("told to fail to free");
    }
    return SourceAdaptor::Free(segment);
  }

 private:
  mutable Mutex mu_;
  std::map<uint64_t, absl::StatusCode> failing_ ABSL_GUARDED_BY(mu_);
  bool fail_free_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t calls_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_ADAPTORS_FAILING_SOURCE_H_
