// The accelerator interface of the engine: device memory, streams, events, asynchronous copies.
//
// Implementations: device/emulated (a discrete-event simulation, no GPU needed) and device/cuda.
// Both pass one conformance suite (tests/device/device_conformance.h).
//
// Semantics are CUDA's: a stream executes its work in order of submission, an event records a point
// of a stream, and a stream can wait for an event. Only SynchronizeStream, WaitEvent and copies of
// pageable memory block the host.
//
// Errors:
//   ResourceExhausted   out of memory; the device stays usable, its latched error has been cleared
//   Unavailable         transient: the same call may succeed later
//   InvalidArgument, FailedPrecondition   a bug of the caller; the device stays usable
//   Internal            sticky (IsSticky): every later call fails too; the process needs a new
//                       device context
//
// Thread safety: thread-safe. Every call leaves the calling thread's current device unchanged.
// Ownership: handles are plain values. Whoever creates a stream or an event destroys it. Foreign
// streams (LibTorch's) are passed as native handles, and Pinion never destroys them.

#ifndef PINION_DEVICE_DEVICE_H_
#define PINION_DEVICE_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion {

// A stream by its native handle: a cudaStream_t, or the emulated device's own. A type of its own,
// so that no event, integer or memory pointer passes for a stream.
class StreamHandle {
 public:
  StreamHandle() = default;  // names no stream; every call refuses it
  explicit StreamHandle(void* native) : native_(native), valid_(true) {}
  // A null handle is CUDA's legacy default stream: StreamHandle(nullptr) names that stream.
  void* native() const { return native_; }
  bool valid() const { return valid_; }
  friend bool operator==(const StreamHandle&, const StreamHandle&) = default;

 private:
  void* native_ = nullptr;
  bool valid_ = false;
};

class EventHandle {
 public:
  EventHandle() = default;
  explicit EventHandle(void* native) : native_(native) {}
  void* native() const { return native_; }
  bool valid() const { return native_ != nullptr; }
  friend bool operator==(const EventHandle&, const EventHandle&) = default;

 private:
  void* native_ = nullptr;
};

enum class CopyDirection { kHostToDevice, kDeviceToHost };

// Returns "H2D" or "D2H".
inline const char* CopyDirectionName(CopyDirection direction) {
  return direction == CopyDirection::kHostToDevice ? "H2D" : "D2H";
}

// A contiguous part of a copy. Exactly one of the two pointers is device memory, according to the
// direction. size_bytes > 0.
struct CopyPiece {
  void* dst = nullptr;
  const void* src = nullptr;
  uint64_t size_bytes = 0;
};

// Returns true if `status` means that every later call on the device fails too.
inline bool IsSticky(const absl::Status& status) { return absl::IsInternal(status); }

enum class LinkKind {
  kUnknown,
  kPcie,
  kNvlinkC2c,
  kNone,  // device and host share one memory
};

// Properties of a device that are known without measuring it; for reports and benchmarks.
struct DeviceInfo {
  std::string model;  // "NVIDIA H200"
  LinkKind link = LinkKind::kUnknown;
  std::string link_name;      // "PCIe 5 x16", "NVLink-C2C"; empty: unknown
  double rated_gb_per_s = 0;  // raw link bandwidth per direction, 1e9 bytes per second; 0: unknown
  int numa_node = -1;         // host NUMA node next to the device; -1: unknown
  bool modelled = false;      // times are virtual
};

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string name() const = 0;  // "cuda:0", "emu:1"
  // Returns the known properties; unknown ones keep their defaults.
  virtual DeviceInfo info() const = 0;

  // --- Memory ---
  // Allocates device memory for immediate use on `stream`. After Free it is reused in stream order.
  // ResourceExhausted names the size and the memory in use or free.
  virtual absl::StatusOr<void*> Allocate(uint64_t size_bytes, StreamHandle stream) = 0;
  virtual absl::Status Free(void* data, StreamHandle stream) = 0;

  // Returns a source of pinned host memory, suited for copies with this device.
  virtual std::shared_ptr<HostMemorySource> pinned_source() = 0;

  // --- Streams ---
  // Creates a non-blocking stream (cudaStreamNonBlocking). `name` is for traces.
  virtual absl::StatusOr<StreamHandle> CreateStream(const std::string& name) = 0;
  virtual absl::Status DestroyStream(StreamHandle stream) = 0;
  virtual absl::Status SynchronizeStream(StreamHandle stream) = 0;
  // Returns true while `stream` captures a CUDA graph: its work then runs only when replayed.
  virtual absl::StatusOr<bool> IsCapturing(StreamHandle stream) = 0;

  // --- Events ---
  virtual absl::StatusOr<EventHandle> CreateEvent() = 0;
  // Creates an event that records its completion time, for ElapsedMs. Costs more than CreateEvent.
  virtual absl::StatusOr<EventHandle> CreateTimedEvent() = 0;
  virtual absl::Status DestroyEvent(EventHandle event) = 0;
  // Records the present end of `stream`. Waits made before a new record keep the old one.
  virtual absl::Status RecordEvent(EventHandle event, StreamHandle stream) = 0;
  // Makes later work of `stream` start after the event's last record. Never blocks the host.
  virtual absl::Status StreamWaitEvent(StreamHandle stream, EventHandle event) = 0;
  // Returns true if the work before the last record is done, or if the event was never recorded.
  virtual absl::StatusOr<bool> QueryEvent(EventHandle event) = 0;
  // Blocks until the event is done. Returns DeadlineExceeded after `timeout`, with the stream's
  // obstacle where the device knows it.
  virtual absl::Status WaitEvent(EventHandle event, absl::Duration timeout) = 0;
  // Returns the milliseconds between the last records of two timed events, by the device's clock.
  // Unavailable while one is pending; InvalidArgument if one has no timing or was never recorded.
  virtual absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle end) = 0;

  // --- Copies ---
  // Enqueues all pieces on `stream`. The pieces must not overlap; their order is undefined. All or
  // nothing: after an error that is not sticky, no piece is written later.
  virtual absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                                 StreamHandle stream) = 0;
};

}  // namespace pinion

#endif  // PINION_DEVICE_DEVICE_H_
