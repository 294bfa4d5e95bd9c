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

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "pinion/device/device.h"
#include "pinion/engine/host_buffer.h"

namespace pinion {

// Who bounds the bytes in flight to a device.
enum class FlowControl {
  kEngine,  // Submit blocks the host while the engine's window is full
  kCaller,  // Submit never waits for room: the caller has a bound of its own
};

class CopyBatch {
 public:
  // Copies to the host ignore `flow_control`: the pool of pinned blocks bounds them.
  explicit CopyBatch(CopyDirection direction, FlowControl flow_control = FlowControl::kEngine)
      : direction_(direction), flow_control_(flow_control) {}
  CopyBatch(CopyBatch&&) = default;
  CopyBatch& operator=(CopyBatch&&) = default;

  // Adds a piece. Checks that the range lies in the buffer and that size_bytes > 0.
  void Add(std::shared_ptr<HostBuffer> host, uint64_t host_offset_bytes, void* device_data,
           uint64_t size_bytes);

  CopyDirection direction() const { return direction_; }
  // Returns true if Submit may block the host until the window has room.
  bool waits_for_room() const {
    return direction_ == CopyDirection::kHostToDevice && flow_control_ == FlowControl::kEngine;
  }
  bool empty() const { return pieces_.empty(); }
  uint64_t size_bytes() const { return size_bytes_; }
  absl::Span<const CopyPiece> pieces() const { return pieces_; }
  // Returns the buffers in order of pieces; consecutive pieces of one buffer share an entry.
  absl::Span<const std::shared_ptr<HostBuffer>> buffers() const { return buffers_; }

 private:
  CopyDirection direction_;
  FlowControl flow_control_;
  absl::InlinedVector<CopyPiece, 1> pieces_;
  absl::InlinedVector<std::shared_ptr<HostBuffer>, 1> buffers_;
  uint64_t size_bytes_ = 0;
};

}  // namespace pinion

#endif  // PINION_ENGINE_COPY_BATCH_H_
