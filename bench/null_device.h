// A device that does nothing, for measuring the host's cost. Calls return at once; no byte moves,
// and queries find work complete. Memory is the heap's.
//
// Thread safety: thread-safe; one event at a time from one thread.

#ifndef PINION_BENCH_NULL_DEVICE_H_
#define PINION_BENCH_NULL_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"

namespace pinion {

class NullDevice final : public Device {
 public:
  enum class Events {
    kDone,     // a recorded event is complete
    kPending,  // complete at the second query, so that submissions queue up
  };

  // Counting takes time, so a measured device does not count.
  struct Calls {
    uint64_t events = 0;  // created, recorded, queried and awaited events
    uint64_t copies = 0;  // CopyAsync calls with any number of pieces
    uint64_t capture_queries = 0;
  };

  explicit NullDevice(Events events, bool counts = false) : events_(events), counts_(counts) {}

  Calls calls() const {
    return {.events = event_calls_, .copies = copies_, .capture_queries = capture_queries_};
  }

  std::string name() const override { return "null:0"; }
  DeviceInfo info() const override { return {}; }
  absl::StatusOr<void*> Allocate(uint64_t size_bytes, StreamHandle stream) override {
    return operator new(size_bytes, kPage);
  }
  absl::Status Free(void* data, StreamHandle stream) override {
    operator delete(data, kPage);
    return absl::OkStatus();
  }
  std::shared_ptr<HostMemorySource> pinned_source() override {
    return std::make_shared<PinnedSource>();
  }
  absl::StatusOr<StreamHandle> CreateStream(const std::string& name) override {
    return StreamHandle(reinterpret_cast<void*>(++streams_));
  }
  absl::Status DestroyStream(StreamHandle stream) override { return absl::OkStatus(); }
  absl::Status SynchronizeStream(StreamHandle stream) override { return absl::OkStatus(); }
  absl::StatusOr<bool> IsCapturing(StreamHandle stream) override {
    Count(capture_queries_);
    return false;
  }
  // An event is a flag: whether it is pending.
  absl::StatusOr<EventHandle> CreateEvent() override {
    Count(event_calls_);
    return EventHandle(new bool(false));
  }
  absl::StatusOr<EventHandle> CreateTimedEvent() override { return CreateEvent(); }
  absl::Status DestroyEvent(EventHandle event) override {
    Count(event_calls_);
    delete &Pending(event);
    return absl::OkStatus();
  }
  absl::Status RecordEvent(EventHandle event, StreamHandle stream) override {
    Count(event_calls_);
    Pending(event) = events_ == Events::kPending;
    return absl::OkStatus();
  }
  absl::Status StreamWaitEvent(StreamHandle stream, EventHandle event) override {
    Count(event_calls_);
    return absl::OkStatus();
  }
  absl::StatusOr<bool> QueryEvent(EventHandle event) override {
    Count(event_calls_);
    return !std::exchange(Pending(event), false);
  }
  absl::Status WaitEvent(EventHandle event, absl::Duration timeout) override {
    Count(event_calls_);
    Pending(event) = false;
    return absl::OkStatus();
  }
  absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle end) override { return 0.0; }
  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    Count(copies_);
    return absl::OkStatus();
  }

 private:
  static constexpr std::align_val_t kPage{4096};

  class PinnedSource final : public HostMemorySource {
   public:
    std::string name() const override { return "null pinned"; }
    bool pinned() const override { return true; }
    uint64_t granularity_bytes() const override { return static_cast<uint64_t>(kPage); }
    absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
      return HostSegment{.data = operator new(size_bytes, kPage), .size_bytes = size_bytes};
    }
    absl::Status Free(const HostSegment& segment) override {
      operator delete(segment.data, kPage);
      return absl::OkStatus();
    }
  };

  static bool& Pending(EventHandle event) { return *static_cast<bool*>(event.native()); }

  void Count(std::atomic<uint64_t>& calls) {
    if (counts_) ++calls;
  }

  const Events events_;
  const bool counts_;
  std::atomic<uint64_t> event_calls_{0};
  std::atomic<uint64_t> copies_{0};
  std::atomic<uint64_t> capture_queries_{0};
  std::atomic<uintptr_t> streams_{0};
};

}  // namespace pinion

#endif  // PINION_BENCH_NULL_DEVICE_H_
