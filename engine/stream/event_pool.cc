#include "pinion/engine/stream/event_pool.h"

#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion::internal {

PooledEvent::PooledEvent(std::shared_ptr<EventPool> pool, EventHandle handle)
    : pool_(std::move(pool)), handle_(handle) {}

PooledEvent::~PooledEvent() { pool_->Release(handle_); }

EventPool::EventPool(std::shared_ptr<GuardedDevice> device, Timing timing)
    : device_(std::move(device)), timing_(timing) {}

EventPool::~EventPool() {
  if (!device_->health().ok()) return;  // leaks: the device must not be called
  std::vector<EventHandle> events;
  {
    MutexLock lock(mu_);
    events.swap(free_);
  }
  for (EventHandle event : events) {
    if (absl::Status destroyed = device_->DestroyEvent(event); !destroyed.ok()) {
      PINION_LOG(kWarning) << "an event was leaked: " << destroyed.message();
    }
  }
}

absl::StatusOr<EventRef> EventPool::Acquire() {
  EventHandle event;
  {
    MutexLock lock(mu_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  if (!event.valid()) {
    PINION_ASSIGN_OR_RETURN(
        event, timing_ == Timing::kTimed ? device_->CreateTimedEvent() : device_->CreateEvent());
  }
  return std::make_shared<const PooledEvent>(shared_from_this(), event);
}

absl::StatusOr<EventRef> EventPool::Order(StreamHandle earlier, StreamHandle later) {
  PINION_ASSIGN_OR_RETURN(EventRef event, Acquire());
  PINION_RETURN_IF_ERROR(device_->RecordEvent(event->handle(), earlier));
  PINION_RETURN_IF_ERROR(device_->StreamWaitEvent(later, event->handle()));
  return event;
}

void EventPool::Release(EventHandle event) {
  MutexLock lock(mu_);
  free_.push_back(event);
}

}  // namespace pinion::internal
