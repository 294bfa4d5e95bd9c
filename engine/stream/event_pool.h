// Events, made once and used again.
//
// An event goes back to the pool when the last reference to it is gone, never while somebody may
// still query it or make a stream wait for it: recording it again would move it.
//
// Thread safety: thread-safe. No device call is made while its mutex is held.
// Ownership: references keep the pool alive, the pool keeps the device alive.

#ifndef PINION_ENGINE_STREAM_EVENT_POOL_H_
#define PINION_ENGINE_STREAM_EVENT_POOL_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/device/device.h"
#include "pinion/engine/stream/guarded_device.h"

namespace pinion::internal {

class EventPool;

class PooledEvent {
 public:
  explicit PooledEvent(EventHandle handle) : handle_(handle) {}

  EventHandle handle() const { return handle_; }

 private:
  friend class EventPool;
  friend class EventRef;

  const EventHandle handle_;
  std::atomic<int> references_ = 0;
  std::shared_ptr<EventPool> pool_;  // while there are references
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
  ~EventRef();

  explicit operator bool() const { return event_ != nullptr; }
  bool operator==(std::nullptr_t) const { return event_ == nullptr; }
  const PooledEvent* operator->() const { return event_; }

 private:
  friend class EventPool;
  // Takes over one reference.
  explicit EventRef(PooledEvent* event) : event_(event) {}

  PooledEvent* event_ = nullptr;
};

class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  enum class Timing { kUntimed, kTimed };

  explicit EventPool(std::shared_ptr<GuardedDevice> device, Timing timing = Timing::kUntimed);
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // An event to record. It may still carry an old record: don't query it before.
  absl::StatusOr<EventRef> Acquire();

  // Later work of `later` starts after the present work of `earlier`; both belong to the device.
  // Returns the event of that work.
  absl::StatusOr<EventRef> Order(StreamHandle earlier, StreamHandle later);

 private:
  friend class EventRef;
  void Release(PooledEvent* event);

  const std::shared_ptr<GuardedDevice> device_;
  const Timing timing_;
  Mutex mu_;
  std::vector<std::unique_ptr<PooledEvent>> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_STREAM_EVENT_POOL_H_
