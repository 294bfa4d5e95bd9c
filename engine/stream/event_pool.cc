#include "pinion/engine/stream/event_pool.h"

#include <utility>

#include "absl/container/inlined_vector.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion::internal {

// The holder of the only reference need not decrement the count.
bool EventRef::IsLast(PooledEvent& event) {
  return event.references_.load(std::memory_order_acquire) == 1 ||
         event.references_.fetch_sub(1, std::memory_order_acq_rel) == 1;
}

void EventRef::LetGo() {
  if (IsLast(*event_)) event_->pool_.Release({&event_, 1});
}

void EventRef::LetGoOf(absl::Span<EventRef> events) {
  absl::InlinedVector<PooledEvent*, 32> last;
  for (EventRef& reference : events) {
    PooledEvent* const event = std::exchange(reference.event_, nullptr);
    if (event != nullptr && IsLast(*event)) last.push_back(event);
  }
  if (!last.empty()) last.front()->pool_.Release(last);
}

EventPool::~EventPool() {
  if (!device_->health().ok()) return;  // leaks: the device must not be called
  for (const std::unique_ptr<PooledEvent>& event : free_) {
    if (absl::Status destroyed = device_->DestroyEvent(event->handle()); !destroyed.ok()) {
      PINION_LOG(kWarning) << "an event was leaked: " << destroyed.message();
    }
  }
}

absl::Status EventPool::Acquire(absl::Span<EventRef> events) {
  if (events.empty()) return absl::OkStatus();
  size_t found = 0;
  {
    MutexLock lock(mu_);
    if (used_ == 0) self_ = shared_from_this();
    used_ += events.size();
    for (; found < events.size() && !free_.empty(); ++found) {
      events[found].event_ = free_.back().release();
      free_.pop_back();
    }
  }
  for (size_t i = 0; i < events.size(); ++i) {
    if (i >= found) {
      const absl::StatusOr<EventHandle> handle =
          timing_ == Timing::kTimed ? device_->CreateTimedEvent() : device_->CreateEvent();
      if (!handle.ok()) {
        EventRef::LetGoOf(events.first(i));
        MutexLock lock(mu_);
        used_ -= events.size() - i;
        if (used_ == 0) self_.reset();  // the caller has another reference
        return handle.status();
      }
      events[i].event_ = new PooledEvent(*handle, *this);
    }
    events[i].event_->references_.store(1, std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

void EventPool::Release(absl::Span<PooledEvent* const> events) {
  if (origin_.InForkedChild()) return;
  std::shared_ptr<EventPool> self;  // destroyed after the lock
  MutexLock lock(mu_);
  for (PooledEvent* const event : events) free_.emplace_back(event);
  used_ -= events.size();
  if (used_ == 0) self.swap(self_);
}

absl::StatusOr<EventRef> EventPool::Acquire() {
  EventRef event;
  PINION_RETURN_IF_ERROR(Acquire({&event, 1}));
  return event;
}

absl::Status EventPool::Order(const EventRef& event, StreamHandle earlier, StreamHandle later) {
  PINION_RETURN_IF_ERROR(device_->RecordEvent(event->handle(), earlier));
  return device_->StreamWaitEvent(later, event->handle());
}

}  // namespace pinion::internal
