#include "pinion/engine/stream/event_pool.h"

#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion::internal {

void EventRef::LetGo() {
  // Whoever has the only reference need not count it down.
  if (event_->references_.load(std::memory_order_acquire) > 1 &&
      event_->references_.fetch_sub(1, std::memory_order_acq_rel) > 1) {
    return;
  }
  event_->store_->Release(event_);
}

EventStore::~EventStore() {
  if (!device_->health().ok()) return;  // leaks: the device must not be called
  for (const std::unique_ptr<PooledEvent>& event : free_) {
    if (absl::Status destroyed = device_->DestroyEvent(event->handle()); !destroyed.ok()) {
      PINION_LOG(kWarning) << "an event was leaked: " << destroyed.message();
    }
  }
}

absl::StatusOr<EventRef> EventStore::Acquire() {
  std::unique_ptr<PooledEvent> event;
  {
    MutexLock lock(mu_);
    ++used_;
    if (!free_.empty()) {
      event = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (event == nullptr) {
    absl::StatusOr<std::unique_ptr<PooledEvent>> made = NewEvent();
    if (!made.ok()) {
      MutexLock lock(mu_);
      --used_;
      return made.status();
    }
    event = *std::move(made);
  }
  event->references_.store(1, std::memory_order_relaxed);
  return EventRef(event.release());
}

absl::StatusOr<std::unique_ptr<PooledEvent>> EventStore::NewEvent() {
  PINION_ASSIGN_OR_RETURN(const EventHandle handle, timing_ == Timing::kTimed
                                                        ? device_->CreateTimedEvent()
                                                        : device_->CreateEvent());
  auto event = std::make_unique<PooledEvent>(handle);
  event->store_ = this;
  return event;
}

void EventStore::Release(PooledEvent* event) {
  if (origin_.InForkedChild()) return;
  bool is_last = false;
  {
    MutexLock lock(mu_);
    free_.emplace_back(event);
    is_last = --used_ == 0 && closed_;
  }
  if (is_last) delete this;
}

void EventStore::Close() {
  if (origin_.InForkedChild()) return;
  bool is_last = false;
  {
    MutexLock lock(mu_);
    closed_ = true;
    is_last = used_ == 0;
  }
  if (is_last) delete this;
}

absl::StatusOr<EventRef> EventPool::Order(StreamHandle earlier, StreamHandle later) {
  PINION_ASSIGN_OR_RETURN(EventRef event, Acquire());
  PINION_RETURN_IF_ERROR(device_->RecordEvent(event->handle(), earlier));
  PINION_RETURN_IF_ERROR(device_->StreamWaitEvent(later, event->handle()));
  return event;
}

}  // namespace pinion::internal
