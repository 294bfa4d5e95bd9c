// What the engine needs from an accelerator: memory, streams, events, copies.
//
// Implementations: device/emulated (a discrete-event simulation, no GPU needed) and device/cuda.
// One conformance suite runs on all of them (tests/device/device_conformance.h).
//
// Semantics are CUDA's: a stream is a queue that executes in order of submission; an event records
// a point of a stream; a wait orders a stream after an event; nothing blocks the host except
// SynchronizeStream, WaitEvent with a timeout, and copies of pageable memory.
//
// Errors:
//   ResourceExhausted   out of memory; the device goes on, its latched error has been cleared
//   Unavailable         transient: the same call may succeed later
//   InvalidArgument, FailedPrecondition   the caller's bug; the device goes on
//   Internal            sticky (IsSticky): every later call fails too; the process needs a new
//                       device context
//
// Thread safety: thread-safe. No function leaves the calling thread's current device changed.
// Ownership: handles are plain values; whoever creates a stream or an event destroys it. Foreign
// streams (LibTorch's) are passed as their native handles and are never destroyed here.

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

// A stream by its native handle: a cudaStream_t, or the emulated device's own. Strong types, so
// that an integer, an event or a pointer to memory cannot pass for a stream.
class StreamHandle {
 public:
  StreamHandle() = default;  // names no stream; every call refuses it
  explicit StreamHandle(void* native) : native_(native), valid_(true) {}
  // CUDA's legacy default stream has a null handle: only an explicit StreamHandle(nullptr) is it.
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

const char* CopyDirectionName(CopyDirection direction);  // "H2D", "D2H"

// One contiguous piece of a copy. Exactly one of the two pointers is device memory, as the
// direction says. size_bytes > 0.
struct CopyPiece {
  void* dst = nullptr;
  const void* src = nullptr;
  uint64_t size_bytes = 0;
};

// Whether a status of a Device's says that every later call fails too.
inline bool IsSticky(const absl::Status& status) { return absl::IsInternal(status); }

enum class LinkKind {
  kUnknown,
  kPcie,
  kNvlinkC2c,
  kNone,  // the device's memory is the host's
};

// What is known of a device without measuring it; for reports and benchmarks.
struct DeviceInfo {
  std::string model;  // "NVIDIA H200"
  LinkKind link = LinkKind::kUnknown;
  std::string link_name;      // "PCIe 5 x16", "NVLink-C2C"; empty: unknown
  double rated_gb_per_s = 0;  // of the link, raw, per direction, 1e9 bytes per second; 0: unknown
  int numa_node = -1;         // of the host, next to the device; -1: unknown
  bool modelled = false;      // times are virtual
};

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string name() const = 0;  // "cuda:0", "emu:1"
  virtual int index() const = 0;
  // What cannot be found out is left unknown.
  virtual DeviceInfo info() const = 0;

  // --- Memory ---
  // Device memory that is ready for use on `stream` and, after Free, is reused in the order of
  // `stream` (as a stream-ordered pool does). ResourceExhausted names the size and who holds what.
  virtual absl::StatusOr<void*> Allocate(uint64_t size_bytes, StreamHandle stream) = 0;
  virtual absl::Status Free(void* data, StreamHandle stream) = 0;

  // Pinned host memory for copies with this device, as a source for a PinnedAllocator.
  virtual std::shared_ptr<HostMemorySource> pinned_source() = 0;

  // --- Streams ---
  // A stream that does not synchronise with the legacy default stream. `name` is for traces.
  virtual absl::StatusOr<StreamHandle> CreateStream(const std::string& name) = 0;
  virtual absl::Status DestroyStream(StreamHandle stream) = 0;
  virtual absl::Status SynchronizeStream(StreamHandle stream) = 0;
  // True while `stream` captures a CUDA graph: what is submitted to it runs with each replay only.
  virtual absl::StatusOr<bool> IsCapturing(StreamHandle stream) = 0;

  // --- Events ---
  virtual absl::StatusOr<EventHandle> CreateEvent() = 0;
  // An event that also notes when it is done, for ElapsedMs. Costs more than one without.
  virtual absl::StatusOr<EventHandle> CreateTimedEvent() = 0;
  virtual absl::Status DestroyEvent(EventHandle event) = 0;
  // Recording again moves the event; waits made before keep the old point.
  virtual absl::Status RecordEvent(EventHandle event, StreamHandle stream) = 0;
  // Later work of `stream` starts after the event's last record. Never blocks the host.
  virtual absl::Status StreamWaitEvent(StreamHandle stream, EventHandle event) = 0;
  // True if the last record is done (an event that was never recorded is done).
  virtual absl::StatusOr<bool> QueryEvent(EventHandle event) = 0;
  // Blocks until the event is done. DeadlineExceeded, with the reason where it is known (which
  // stream is stuck behind what), when that takes longer than `timeout`.
  virtual absl::Status WaitEvent(EventHandle event, absl::Duration timeout) = 0;
  // Milliseconds of the device's clock between the last records of two timed events. Unavailable
  // while one of them is not done; InvalidArgument for events without timing or never recorded.
  virtual absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle end) = 0;

  // --- Copies ---
  // Enqueues all pieces on `stream`, in as few driver calls as serve it. The pieces must not
  // overlap: their order among each other is undefined. All or nothing: an error means that nothing
  // of this call will be written later, unless the error is sticky.
  virtual absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                                 StreamHandle stream) = 0;
};

}  // namespace pinion

#endif  // PINION_DEVICE_DEVICE_H_
