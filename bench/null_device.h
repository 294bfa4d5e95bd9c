// A device that does nothing, for measuring the host's cost. Calls return at once; no byte moves,
// and queries find work complete. Memory is the heap's.
//
// Calls are accepted and forgotten: no byte moves, and work is done as soon as it is asked about.
// Memory is the heap's.
//
// CountingNullDevice counts its calls.
//
// Thread safety: thread-safe; one event at a time from one thread.

#ifndef PINION_BENCH_NULL_DEVICE_H_
#define PINION_BENCH_NULL_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"

namespace pinion {

class NullDevice : public Device {
 public:
  enum class Events {
    kDone,     // a recorded event is complete
    kPending,  // complete at the second query, so that submissions queue up
  };

  explicit NullDevice(Events events) : events_(events) {}

  std::string name() const override { return "null:0"; }
  int index() const override { return 0; }
  DeviceInfo info() const override { return {}; }

  absl::StatusOr<void*> Allocate(uint64_t size_bytes, StreamHandle stream) override;
  absl::Status Free(void* data, StreamHandle stream) override;
  std::shared_ptr<HostMemorySource> pinned_source() override;

  absl::StatusOr<StreamHandle> CreateStream(const std::string& name) override;
  absl::Status DestroyStream(StreamHandle stream) override { return absl::OkStatus(); }
  absl::Status SynchronizeStream(StreamHandle stream) override { return absl::OkStatus(); }
  absl::StatusOr<bool> IsCapturing(StreamHandle stream) override { return false; }

  absl::StatusOr<EventHandle> CreateEvent() override;
  absl::StatusOr<EventHandle> CreateTimedEvent() override { return CreateEvent(); }
  absl::Status DestroyEvent(EventHandle event) override;
  absl::Status RecordEvent(EventHandle event, StreamHandle stream) override;
  absl::Status StreamWaitEvent(StreamHandle stream, EventHandle event) override {
    return absl::OkStatus();
  }
  absl::StatusOr<bool> QueryEvent(EventHandle event) override;
  absl::Status WaitEvent(EventHandle event, absl::Duration timeout) override;
  absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle end) override { return 0.0; }

  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    return absl::OkStatus();
  }

 private:
  const Events events_;
  std::atomic<uintptr_t> streams_{0};
};

class CountingNullDevice final : public NullDevice {
 public:
  struct Calls {
    uint64_t events = 0;  // created, recorded, queried and awaited events
    uint64_t copies = 0;  // CopyAsync calls with any number of pieces
    uint64_t capture_queries = 0;
  };

  CountingNullDevice() : NullDevice(Events::kDone) {}

  Calls calls() const {
    return {.events = events_, .copies = copies_, .capture_queries = capture_queries_};
  }

  absl::StatusOr<bool> IsCapturing(StreamHandle stream) override;
  absl::StatusOr<EventHandle> CreateEvent() override;
  absl::Status DestroyEvent(EventHandle event) override;
  absl::Status RecordEvent(EventHandle event, StreamHandle stream) override;
  absl::Status StreamWaitEvent(StreamHandle stream, EventHandle event) override;
  absl::StatusOr<bool> QueryEvent(EventHandle event) override;
  absl::Status WaitEvent(EventHandle event, absl::Duration timeout) override;
  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override;

 private:
  std::atomic<uint64_t> events_{0};
  std::atomic<uint64_t> copies_{0};
  std::atomic<uint64_t> capture_queries_{0};
};

}  // namespace pinion

#endif  // PINION_BENCH_NULL_DEVICE_H_
