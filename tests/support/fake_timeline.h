// A timeline that the test advances.
//
//   auto timeline = std::make_shared<FakeTimeline>();
//   std::move(block).ReleaseAfter({timeline->Ticket(5)});
//   timeline->CompleteOnDevice(5);   // the next Poll or Wait sees it
//   timeline->CompleteVisibly(5);    // Completed() returns it at once
//
// Thread safety: thread-safe.

#ifndef PINION_TESTS_SUPPORT_FAKE_TIMELINE_H_
#define PINION_TESTS_SUPPORT_FAKE_TIMELINE_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/fence.h"

namespace pinion::testing {

class FakeTimeline final : public FenceTimeline, public std::enable_shared_from_this<FakeTimeline> {
 public:
  FenceTicket Ticket(uint64_t value) { return {shared_from_this(), value}; }

  void CompleteOnDevice(uint64_t value) { Raise(on_device_, value); }
  void CompleteVisibly(uint64_t value) {
    Raise(on_device_, value);
    Raise(completed_, value);
  }

  uint64_t polls() const { return polls_; }
  uint64_t waits() const { return waits_; }

  uint64_t Completed() const noexcept override {
    return completed_.load(std::memory_order_acquire);
  }

  void Poll() override {
    ++polls_;
    Raise(completed_, on_device_);
  }

  absl::Status Wait(uint64_t value, absl::Duration timeout) override {
    ++waits_;
    const pinion::internal::Deadline deadline(timeout);
    while (true) {
      Raise(completed_, on_device_);
      if (Completed() >= value) return absl::OkStatus();
      if (deadline.Left() == absl::ZeroDuration())
        return absl::DeadlineExceededError("fake timeline");
      absl::SleepFor(absl::Microseconds(20));
    }
  }

 private:
  static void Raise(std::atomic<uint64_t>& counter, uint64_t value) {
    uint64_t old = counter.load();
    while (old < value && !counter.compare_exchange_weak(old, value)) {
    }
  }

  std::atomic<uint64_t> on_device_{0};
  std::atomic<uint64_t> completed_{0};
  std::atomic<uint64_t> polls_{0};
  std::atomic<uint64_t> waits_{0};
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_FAKE_TIMELINE_H_
