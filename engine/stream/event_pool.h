// Events, made once and used again.
//
// An event goes back to the pool when the last reference to it is gone, never while somebody may
// still query it or make a stream wait for it: recording it again would move it.
//
// Thread safety: thread-safe. No device call is made while its mutex is held. In a child of fork()
// pool and references leak what they hold.
// Ownership: references keep the pool's events, and with them the device, alive.

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

class EventStore;

class PooledEvent {
 public:
  explicit PooledEvent(EventHandle handle) : handle_(handle) {}

  EventHandle handle() const { return handle_; }

 private:
  friend class EventStore;
  friend class EventRef;

  const EventHandle handle_;
  std::atomic<int> references_ = 0;
  EventStore* store_ = nullptr;  // which lives while there are references
};

// A reference to an event, or none. Unlike a shared_ptr it needs no allocation: a saved tensor's
// way has four events.
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

  // Lets go of references to events of one pool, under one lock of it.
  static void LetGoOf(absl::Span<EventRef> events);

  explicit operator bool() const { return event_ != nullptr; }
  bool operator==(std::nullptr_t) const { return event_ == nullptr; }
  const PooledEvent* operator->() const { return event_; }

 private:
  friend class EventStore;
  void LetGo();
  // Whether it was the last reference, which is not counted down then.
  static bool IsLast(PooledEvent& event);

  PooledEvent* event_ = nullptr;
};

// What a pool and the references to its events share: it goes with the last of them. The events
// that are in use are counted under the lock that each of them needs anyway.
class EventStore {
 public:
  enum class Timing { kUntimed, kTimed };

  EventStore(std::shared_ptr<GuardedDevice> device, Timing timing)
      : device_(std::move(device)), timing_(timing) {}
  EventStore(const EventStore&) = delete;
  EventStore& operator=(const EventStore&) = delete;

  // Into each of `events`. An error leaves all of them empty.
  absl::Status Acquire(absl::Span<EventRef> events);
  // Nobody acquires any more. May destroy the store.
  void Close();

 private:
  friend class EventRef;

  ~EventStore();
  // May destroy the store.
  void Release(absl::Span<PooledEvent* const> events);
  absl::StatusOr<std::unique_ptr<PooledEvent>> NewEvent();

  const std::shared_ptr<GuardedDevice> device_;
  const Timing timing_;
  const ForkOrigin origin_;
  Mutex mu_;
  std::vector<std::unique_ptr<PooledEvent>> free_ ABSL_GUARDED_BY(mu_);
  size_t used_ ABSL_GUARDED_BY(mu_) = 0;  // events that have references, or will have at once
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

class EventPool {
 public:
  using Timing = EventStore::Timing;

  explicit EventPool(std::shared_ptr<GuardedDevice> device, Timing timing = Timing::kUntimed)
      : device_(device), store_(new EventStore(std::move(device), timing)) {}
  ~EventPool() { store_->Close(); }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // An event to record. It may still carry an old record: don't query it before.
  absl::StatusOr<EventRef> Acquire();
  // As many, under one lock. An error leaves all of them empty.
  absl::Status Acquire(absl::Span<EventRef> events) { return store_->Acquire(events); }

  // Later work of `later` starts after the present work of `earlier`, of which `event` tells; both
  // belong to the device.
  absl::Status Order(const EventRef& event, StreamHandle earlier, StreamHandle later);

 private:
  const std::shared_ptr<GuardedDevice> device_;
  EventStore* const store_;
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_STREAM_EVENT_POOL_H_
