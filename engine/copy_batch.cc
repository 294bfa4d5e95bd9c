#include "pinion/engine/copy_batch.h"

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

void CopyBatch::Add(std::shared_ptr<HostBuffer> host, uint64_t host_offset_bytes, void* device_data,
                    uint64_t size_bytes) {
  PINION_CHECK(host != nullptr)
      << "CopyBatch::Add of " << size_bytes
      << " bytes: the host buffer is null; pass a HostBuffer over a block of the pool";
  PINION_CHECK(device_data != nullptr) << "CopyBatch::Add of " << size_bytes
                                       << " bytes: the device memory is null; pass the address of "
                                          "memory that Device::Allocate returned";
  PINION_CHECK(size_bytes > 0) << "CopyBatch::Add of 0 bytes is an empty piece; leave it out";
  PINION_CHECK(host_offset_bytes <= host->size_bytes() &&
               size_bytes <= host->size_bytes() - host_offset_bytes)
      << "bytes [" << host_offset_bytes << ", +" << size_bytes << ") of a host buffer of "
      << host->size_bytes() << " bytes";
  void* const host_data = static_cast<char*>(host->data()) + host_offset_bytes;
  if (direction_ == CopyDirection::kDeviceToHost) {
    pieces_.push_back({host_data, device_data, size_bytes});
  } else {
    pieces_.push_back({device_data, host_data, size_bytes});
  }
  size_bytes_ += size_bytes;
  if (buffers_.empty() || buffers_.back() != host) buffers_.push_back(std::move(host));
}

}  // namespace pinion
