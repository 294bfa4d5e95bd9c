#include "pinion/engine/host_buffer.h"

#include <algorithm>
#include <utility>

#include "pinion/allocator/base/check.h"

namespace pinion {

HostBuffer::HostBuffer(PinnedBlock block) : block_(std::move(block)) {
  PINION_CHECK(!block_.empty()) << "a HostBuffer needs a block that was not moved from";
}

HostBuffer::~HostBuffer() { std::move(block_).ReleaseAfter(tickets_); }

HostBuffer::Tickets HostBuffer::tickets() const {
  MutexLock lock(mu_);
  return tickets_;
}

void HostBuffer::AddTicket(FenceTicket ticket) {
  MutexLock lock(mu_);
  for (FenceTicket& known : tickets_) {
    if (known.timeline == ticket.timeline) {
      known.value = std::max(known.value, ticket.value);
      return;
    }
  }
  tickets_.push_back(std::move(ticket));
}

}  // namespace pinion
