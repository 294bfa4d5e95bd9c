// Collects the pieces of one transfer between a device and pinned host buffers.
//
//   CopyBatch batch(CopyDirection::kDeviceToHost);
//   batch.Add(buffer, /*host_offset_bytes=*/0, tensor_data, tensor_bytes);
//   PINION_ASSIGN_OR_RETURN(Transfer out, engine->Submit(batch, compute_stream));
//
// One ticket covers the whole batch: no piece is available before all are copied.
//
// Thread safety: none; build it on one thread.
// Ownership: the batch keeps its host buffers alive until Submit has given them its ticket. The
// caller keeps the device memory until the transfer is done, by the order of a waiting stream.

#ifndef PINION_ENGINE_COPY_BATCH_H_
#define PINION_ENGINE_COPY_BATCH_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/device/device.h"

namespace pinion {

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

class CopyBatch {
 public:
  explicit CopyBatch(CopyDirection direction) : direction_(direction) {}
  CopyBatch(CopyBatch&&) = default;
  CopyBatch& operator=(CopyBatch&&) = default;

  // Adds a piece. Checks that the range lies in the buffer and that size_bytes > 0.
  void Add(std::shared_ptr<HostBuffer> host, uint64_t host_offset_bytes, void* device_data,
           uint64_t size_bytes);

  CopyDirection direction() const { return direction_; }
  bool empty() const { return pieces_.empty(); }
  uint64_t size_bytes() const { return size_bytes_; }
  absl::Span<const CopyPiece> pieces() const { return pieces_; }
  // Returns the buffers in order of pieces; consecutive pieces of one buffer share an entry.
  absl::Span<const std::shared_ptr<HostBuffer>> buffers() const { return buffers_; }

 private:
  CopyDirection direction_;
  absl::InlinedVector<CopyPiece, 1> pieces_;
  absl::InlinedVector<std::shared_ptr<HostBuffer>, 1> buffers_;
  uint64_t size_bytes_ = 0;
};

}  // namespace pinion

#endif  // PINION_ENGINE_COPY_BATCH_H_
