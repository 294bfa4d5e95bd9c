#include "pinion/engine/stream/event_pool.h"

#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion::internal {

EventRef::~EventRef() {
  if (event_ == nullptr || event_->references_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  // The pool may go with its last event.
  const std::shared_ptr<EventPool> pool = std::move(event_->pool_);
  pool->Release(event_);
}

EventPool::EventPool(std::shared_ptr<GuardedDevice> device, Timing timing)
    : device_(std::move(device)), timing_(timing) {}

EventPool::~EventPool() {
  if (!device_->health().ok()) return;  // leaks: the device must not be called
  std::vector<std::unique_ptr<PooledEvent>> events;
  {
    MutexLock lock(mu_);
    events.swap(free_);
  }
  for (const std::unique_ptr<PooledEvent>& event : events) {
    if (absl::Status destroyed = device_->DestroyEvent(event->handle()); !destroyed.ok()) {
      PINION_LOG(kWarning) << "an event was leaked: " << destroyed.message();
    }
  }
}

absl::StatusOr<EventRef> EventPool::Acquire() {
  std::unique_ptr<PooledEvent> event;
  {
    MutexLock lock(mu_);
    if (!free_.empty()) {
      event = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (event == nullptr) {
    PINION_ASSIGN_OR_RETURN(const EventHandle handle, timing_ == Timing::kTimed
                                                          ? device_->CreateTimedEvent()
                                                          : device_->CreateEvent());
    event = std::make_unique<PooledEvent>(handle);
  }
  event->pool_ = shared_from_this();
  event->references_.store(1, std::memory_order_relaxed);
  return EventRef(event.release());
}

absl::StatusOr<EventRef> EventPool::Order(StreamHandle earlier, StreamHandle later) {
  PINION_ASSIGN_OR_RETURN(EventRef event, Acquire());
  PINION_RETURN_IF_ERROR(device_->RecordEvent(event->handle(), earlier));
  PINION_RETURN_IF_ERROR(device_->StreamWaitEvent(later, event->handle()));
  return event;
}

void EventPool::Release(PooledEvent* event) {
  MutexLock lock(mu_);
  free_.emplace_back(event);
}

}  // namespace pinion::internal
