// A source of real, aligned host memory that tests can make fail. It aborts on a wrong Free, and
// reports memory that was never freed.
//
//   auto source = std::make_shared<FakeSource>();
//   source->FailCall(2);                       // the third Allocate fails
//   source->on_allocate = [&] { ... };         // called by each Allocate
//   source->on_free = [&] { ... };             // called by each Free, before it frees the memory
//   EXPECT_EQ(source->outstanding_bytes(), 0);
//
// Thread safety: thread-safe once on_allocate and on_free are set.

#ifndef PINION_TESTS_SUPPORT_FAKE_SOURCE_H_
#define PINION_TESTS_SUPPORT_FAKE_SOURCE_H_

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion::testing {

class FakeSource final : public HostMemorySource {
 public:
  explicit FakeSource(uint64_t granularity_bytes = 4096) : granularity_bytes_(granularity_bytes) {}

  ~FakeSource() override {
    for (const auto& [data, size_bytes] : segments_) std::free(data);
  }

  std::function<void()> on_allocate;
  std::function<void()> on_free;

  // Makes the call with this number, counted from 0, fail with `code`.
  void FailCall(uint64_t call, absl::StatusCode code = absl::StatusCode::kResourceExhausted) {
    MutexLock lock(mu_);
    failing_[call] = code;
  }
  // Makes every call fail that would exceed `bytes` outstanding.
  void LimitBytes(uint64_t bytes) {
    MutexLock lock(mu_);
    limit_bytes_ = bytes;
  }
  void FailEveryFree() {
    MutexLock lock(mu_);
    fail_free_ = true;
  }

  uint64_t calls() const {
    MutexLock lock(mu_);
    return calls_;
  }
  uint64_t outstanding_bytes() const {
    MutexLock lock(mu_);
    return outstanding_bytes_;
  }

  std::string name() const override { return "fake"; }
  bool pinned() const override { return true; }
  uint64_t granularity_bytes() const override { return granularity_bytes_; }

  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    PINION_RETURN_IF_ERROR(CheckSize(size_bytes));
    if (on_allocate) on_allocate();
    MutexLock lock(mu_);
    const auto failing = failing_.find(calls_++);
    if (failing != failing_.end()) return absl::Status(failing->second, "told to fail");
    if (size_bytes > limit_bytes_ || outstanding_bytes_ > limit_bytes_ - size_bytes) {
      return absl::ResourceExhaustedError("over the fake's limit");
    }
    void* data = std::aligned_alloc(granularity_bytes_, size_bytes);
    PINION_CHECK(data != nullptr);
    segments_[data] = size_bytes;
    outstanding_bytes_ += size_bytes;
    return HostSegment{.data = data, .size_bytes = size_bytes, .numa_node = 3};
  }

  absl::Status Free(const HostSegment& segment) override {
    if (on_free) on_free();
    MutexLock lock(mu_);
    const auto found = segments_.find(segment.data);
    PINION_CHECK(found != segments_.end() && found->second == segment.size_bytes)
        << "freed a segment that the fake does not know";
    if (fail_free_) return absl::InternalError("told to fail to free");
    std::free(segment.data);
    outstanding_bytes_ -= segment.size_bytes;
    segments_.erase(found);
    return absl::OkStatus();
  }

 private:
  const uint64_t granularity_bytes_;
  mutable Mutex mu_;
  std::map<uint64_t, absl::StatusCode> failing_ ABSL_GUARDED_BY(mu_);
  uint64_t limit_bytes_ ABSL_GUARDED_BY(mu_) = uint64_t{1} << 40;
  bool fail_free_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t calls_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t outstanding_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<void*, uint64_t> segments_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_FAKE_SOURCE_H_
