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
// Thread safety: all of FenceTimeline is thread-safe; a FenceTicket is a value.
// Ownership: a ticket shares ownership of its timeline, so it can outlive whoever issued it.

#ifndef PINION_ALLOCATOR_FENCE_H_
#define PINION_ALLOCATOR_FENCE_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace pinion {

class FenceTimeline {
 public:
  virtual ~FenceTimeline() = default;

  // Every ticket up to and including this number is done. Never decreases; an atomic load.
  virtual uint64_t Completed() const = 0;

  // Asks the device how far it has come, so that Completed() may rise. May call the device: never
  // call it with a lock held. Does nothing useful once the device has failed for good.
  virtual void Poll() = 0;

  // Blocks until Completed() >= value. DeadlineExceeded when that takes longer than `timeout`;
  // the device's error when the timeline can no longer advance.
  virtual absl::Status Wait(uint64_t value, absl::Duration timeout) = 0;
};

struct FenceTicket {
  std::shared_ptr<FenceTimeline> timeline;  // null: a ticket that is always done
  uint64_t value = 0;

  bool IsDone() const { return timeline == nullptr || timeline->Completed() >= value; }
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_FENCE_H_
