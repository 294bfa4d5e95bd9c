// Pools device events: creates each once and reuses it after its last reference is gone.
//
//   auto events = std::make_shared<EventPool>(device);
//   PINION_ASSIGN_OR_RETURN(const EventRef event, events->Acquire());
//   PINION_RETURN_IF_ERROR(events->Order(event, compute_stream, copy_stream));
//
// An event is never reused while a reference exists: a new record would move it under a pending
// query or wait.
//
// Thread safety: thread-safe. No device call is made under the mutex. In a child of fork() the pool
// and its references leak their events.
// Ownership: references keep the pool and the device alive.

#ifndef PINION_ENGINE_STREAM_EVENT_POOL_H_
#define PINION_ENGINE_STREAM_EVENT_POOL_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/device/device.h"
#include "pinion/engine/stream/guarded_device.h"

namespace pinion::internal {

class EventPool;

class PooledEvent {
 public:
  PooledEvent(EventHandle handle, EventPool& pool) : handle_(handle), pool_(pool) {}

  EventHandle handle() const { return handle_; }

 private:
  friend class EventPool;
  friend class EventRef;

  const EventHandle handle_;
  EventPool& pool_;  // outlives the references
  std::atomic<int> references_ = 0;
};

// A counted reference to a pooled event, or null. Needs no allocation, unlike a shared_ptr: a saved
// tensor uses four events.
class EventRef {
 public:
  EventRef() = default;
  EventRef(const EventRef& other) : event_(other.event_) {
    if (event_ != nullptr) event_->references_.fetch_add(1, std::memory_order_relaxed);
  }
  EventRef(EventRef&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  EventRef& operator=(EventRef other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~EventRef() {
    if (event_ != nullptr) LetGo();
  }

  // Releases references to events of one pool, under one lock.
  static void LetGoOf(absl::Span<EventRef> events);

  explicit operator bool() const { return event_ != nullptr; }
  bool operator==(std::nullptr_t) const { return event_ == nullptr; }
  const PooledEvent* operator->() const { return event_; }

 private:
  friend class EventPool;
  void LetGo();
  // Returns true if this was the last reference; its count may then stay at 1.
  static bool IsLast(PooledEvent& event);

  PooledEvent* event_ = nullptr;
};

class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  enum class Timing { kUntimed, kTimed };

  explicit EventPool(std::shared_ptr<GuardedDevice> device, Timing timing = Timing::kUntimed)
      : device_(std::move(device)), timing_(timing) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // Returns an event to record. Record it before querying: it may carry an old record.
  absl::StatusOr<EventRef> Acquire();
  // Fills `events` under one lock. After an error all of them are empty.
  absl::Status Acquire(absl::Span<EventRef> events);

  // Makes later work of `later` start after the present work of `earlier`, by recording `event`.
  // Both streams belong to the device.
  absl::Status Order(const EventRef& event, StreamHandle earlier, StreamHandle later);

 private:
  friend class EventRef;

  // Returns events to the pool. May destroy the pool.
  void Release(absl::Span<PooledEvent* const> events);

  const std::shared_ptr<GuardedDevice> device_;
  const Timing timing_;
  const ForkOrigin origin_;
  Mutex mu_;
  std::vector<std::unique_ptr<PooledEvent>> free_ ABSL_GUARDED_BY(mu_);
  size_t used_ ABSL_GUARDED_BY(mu_) = 0;  // events with references, or about to have some
  std::shared_ptr<EventPool> self_ ABSL_GUARDED_BY(mu_);  // null unless events are used
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_STREAM_EVENT_POOL_H_
