// Events, made once and used again.
//
// An event goes back to the pool when the last reference to it is gone, never while somebody may
// still query it or make a stream wait for it: recording it again would move it.
//
// Thread safety: thread-safe. No device call is made while its mutex is held.
// Ownership: references keep the pool alive, the pool keeps the device alive.

#ifndef PINION_ENGINE_STREAM_EVENT_POOL_H_
#define PINION_ENGINE_STREAM_EVENT_POOL_H_

#include <memory>
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
  PooledEvent(std::shared_ptr<EventPool> pool, EventHandle handle);
  ~PooledEvent();
  PooledEvent(const PooledEvent&) = delete;
  PooledEvent& operator=(const PooledEvent&) = delete;

  EventHandle handle() const { return handle_; }

 private:
  const std::shared_ptr<EventPool> pool_;
  const EventHandle handle_;
};

using EventRef = std::shared_ptr<const PooledEvent>;

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
  friend class PooledEvent;
  void Release(EventHandle event);

  const std::shared_ptr<GuardedDevice> device_;
  const Timing timing_;
  Mutex mu_;
  std::vector<EventHandle> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_STREAM_EVENT_POOL_H_
