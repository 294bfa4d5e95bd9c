// A pinned block plus the tickets of the copies that touch it.
//
// The destructor releases the block after those tickets, so nobody has to remember to: this is the
// only way in which the engine lets a device touch host memory.
//
// Thread safety: thread-safe. The bytes are the owner's to order: read them on the host only after
// Transfer::Wait.
// Ownership: shared; a CopyBatch holds a reference until it was submitted. From then on the
// buffer's tickets keep the memory from being reused, whether the buffer itself lives or not.

#ifndef PINION_ENGINE_HOST_BUFFER_H_
#define PINION_ENGINE_HOST_BUFFER_H_

#include <cstdint>
#include <memory>

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

  // The latest ticket of each timeline that has touched this buffer, and of these, the ones that
  // are not done as far as is known.
  Tickets tickets() const;
  Tickets open_tickets() const;
  // Keeps the later one of two tickets of the same timeline. Called by the engine at Submit, and by
  // whoever else is at work on the bytes: copies that are submitted later wait for it.
  void AddTicket(FenceTicket ticket);

 private:
  PinnedBlock block_;
  mutable Mutex mu_;
  Tickets tickets_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_ENGINE_HOST_BUFFER_H_
