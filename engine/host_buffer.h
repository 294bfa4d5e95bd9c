// A pinned block that frees itself only after the copies that touch it.
//
//   auto buffer = std::make_shared<HostBuffer>(std::move(block));
//   batch.Add(buffer, /*host_offset_bytes=*/0, data, size_bytes);
//
// The destructor releases the block after the buffer's tickets. The engine lets a device touch host
// memory only through this class.
//
// Thread safety: thread-safe. The bytes are the caller's to order: read them on the host only after
// Transfer::Wait.
// Ownership: shared; a CopyBatch holds a reference until it is submitted. Afterwards the tickets
// keep the memory from being reused, even without the buffer.

#ifndef PINION_ENGINE_HOST_BUFFER_H_
#define PINION_ENGINE_HOST_BUFFER_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_block.h"

namespace pinion {

class HostBuffer {
 public:
  explicit HostBuffer(PinnedBlock block);
  ~HostBuffer();
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  void* data() const { return block_.data(); }
  uint64_t size_bytes() const { return block_.size_bytes(); }

  using Tickets = absl::InlinedVector<FenceTicket, 2>;

  // Returns the latest ticket of each timeline that touched this buffer.
  Tickets tickets() const;
  // Adds a ticket; of two tickets of one timeline the later one stays. The engine calls it in
  // Submit. Call it for other work on the bytes: copies submitted later wait for that work.
  void AddTicket(FenceTicket ticket);

 private:
  PinnedBlock block_;
  mutable Mutex mu_;
  Tickets tickets_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_ENGINE_HOST_BUFFER_H_
