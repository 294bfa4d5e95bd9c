// A fence is a number.
//
// Whoever orders work on a device numbers what it submits, 1, 2, 3, ... on a *timeline*. A
// FenceTicket names one point on one timeline; it is done when the timeline's completed count has
// reached it. The allocator keeps a block that was released with a ticket until then, by comparing
// two integers: it needs no event per block, knows no device, and one stuck timeline holds back
// only the blocks that wait for it.
//
//   FenceTicket ticket = transfer.ticket();
//   std::move(block).ReleaseAfter({ticket});      // reusable when ticket.IsDone()
//
// Anyone may number work: a device's streams, the reads of a file, a thread of the CPU. Copies wait
// for all of them alike (engine/host_buffer.h).
//
// Thread safety: all of FenceTimeline is thread-safe; a FenceTicket is a value.
// Ownership: a ticket shares ownership of its timeline, so it can outlive whoever issued it.

#ifndef PINION_ALLOCATOR_FENCE_H_
#define PINION_ALLOCATOR_FENCE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace pinion {

// A stream, for a timeline that is to make it wait.
class EventWaiter {
 public:
  // Later work of the stream starts after `event`, a recorded event of the stream's kind of device
  // in that device's own type (cudaEvent_t). Does not block the host.
  virtual absl::Status WaitForEvent(void* event) = 0;

 protected:
  ~EventWaiter() = default;
};

class FenceTimeline {
 public:
  virtual ~FenceTimeline() = default;

  // Every ticket up to and including this number is done. Never decreases; an atomic load. It is
  // called with locks held, and from destructors.
  virtual uint64_t Completed() const noexcept = 0;

  // Asks the device how far it has come, so that Completed() may rise. May call the device: never
  // call it with a lock held. Does nothing useful once the device has failed for good.
  virtual void Poll() = 0;

  // Blocks until Completed() >= value. DeadlineExceeded when that takes longer than `timeout`;
  // the device's error when the timeline can no longer advance.
  virtual absl::Status Wait(uint64_t value, absl::Duration timeout) = 0;

  // Later work of `stream` starts after number `value`, without blocking the host. Unimplemented
  // where there is no event to wait for: whoever asked then calls Wait. `stream` is of the kind of
  // device that the timeline's events are of.
  virtual absl::Status OrderAfter(uint64_t /*value*/, EventWaiter& /*stream*/) {
    return absl::UnimplementedError("this timeline has no events");
  }

  // For a timeout's message: what number `value` is and what it waits for, as far as is known. May
  // call the device.
  virtual std::string WhyPending(uint64_t value) {
    return "number " + std::to_string(value) + " of somebody else's timeline is not done";
  }
};

struct FenceTicket {
  std::shared_ptr<FenceTimeline> timeline;  // null: a ticket that is always done
  uint64_t value = 0;

  bool IsDone() const { return timeline == nullptr || timeline->Completed() >= value; }
  // Blocks until it is done, as FenceTimeline::Wait. OK at once if it is done already.
  absl::Status Wait(absl::Duration timeout) const {
    return IsDone() ? absl::OkStatus() : timeline->Wait(value, timeout);
  }
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_FENCE_H_
