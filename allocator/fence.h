// A fence is a number.
//
// Work that is submitted in order gets the numbers 1, 2, 3, ... of a *timeline*. A FenceTicket
// names one number of a timeline. It is done when the timeline's completed count has reached that
// number.
//
//   FenceTicket ticket = transfer.ticket();
//   std::move(block).ReleaseAfter({ticket});      // reusable when ticket.IsDone()
//
// So the allocator tells by comparing two integers whether a released block is reusable. It needs
// no event per block and knows no device. A stuck timeline holds back only the blocks that wait for
// it.
//
// Any work may be numbered: a device's streams, reads of a file, a CPU thread. Copies wait for all
// kinds alike (engine/copy_batch.h).
//
// Thread safety: FenceTimeline is thread-safe; a FenceTicket is a value. Ownership: a ticket shares
// ownership of its timeline, so it may outlive the timeline's owner.

#ifndef PINION_ALLOCATOR_FENCE_H_
#define PINION_ALLOCATOR_FENCE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace pinion {

// A stream that a timeline can make wait.
class EventWaiter {
 public:
  // Makes later work of the stream start after `event`. The event was recorded on a device of the
  // stream's kind and has that device's type (cudaEvent_t). Does not block the host.
  virtual absl::Status WaitForEvent(void* event) = 0;

 protected:
  ~EventWaiter() = default;
};

class FenceTimeline {
 public:
  virtual ~FenceTimeline() = default;

  // Returns the number up to which all tickets are done. It never decreases. An atomic load, which
  // is called with locks held and from destructors.
  virtual uint64_t Completed() const noexcept = 0;

  // Asks the device for its progress, so that Completed() may rise. May call the device: never call
  // it with a lock held. Has no effect once the device has failed permanently.
  virtual void Poll() = 0;

  // Blocks until Completed() >= value. Errors: DeadlineExceeded after `timeout`, the device's error
  // if the timeline can no longer advance, or InvalidArgument for a number that was never given.
  virtual absl::Status Wait(uint64_t value, absl::Duration timeout) = 0;

  // Makes later work of `stream` start after number `value`, without blocking the host. The stream
  // is of the timeline's kind of device. Unimplemented if there is no event to wait for; then call
  // Wait.
  virtual absl::Status OrderAfter(uint64_t /*value*/, EventWaiter& /*stream*/) {
    return absl::UnimplementedError("this timeline has no events");
  }

  // Describes for a timeout's message what number `value` is and what it waits for. May call the
  // device.
  virtual std::string WhyPending(uint64_t value) {
    return "number " + std::to_string(value) + " of somebody else's timeline is not done";
  }
};

struct FenceTicket {
  std::shared_ptr<FenceTimeline> timeline;  // null: a ticket that is always done
  uint64_t value = 0;

  bool IsDone() const { return timeline == nullptr || timeline->Completed() >= value; }
  // Blocks until the ticket is done, like FenceTimeline::Wait. Returns OK at once if it is done.
  absl::Status Wait(absl::Duration timeout) const {
    return IsDone() ? absl::OkStatus() : timeline->Wait(value, timeout);
  }
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_FENCE_H_
