// A device with the engine, pinned memory, streams and clock that copies need. The device may be
// emulated, CUDA's, or one that does nothing.
//
// The device may be any: emulated, CUDA's, or one that does nothing.
//
// Thread safety: none.
// Ownership: memory and lanes share ownership of what they need and may outlive the world.

#ifndef PINION_BENCH_COPY_WORLD_H_
#define PINION_BENCH_COPY_WORLD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/bench/test_pattern.h"
#include "pinion/device/device.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/host_buffer.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion {

class CopyWorld {
 public:
  // `compute` is the program's compute stream; `now_ms` the device's clock.
  static absl::StatusOr<std::unique_ptr<CopyWorld>> Create(std::shared_ptr<Device> device,
                                                           StreamHandle compute,
                                                           std::function<double()> now_ms);
  ~CopyWorld();
  CopyWorld(const CopyWorld&) = delete;
  CopyWorld& operator=(const CopyWorld&) = delete;

  Device& device() { return *device_; }
  TransferEngine& engine() { return *engine_; }
  PinnedAllocator& allocator() { return *allocator_; }
  StreamHandle compute() const { return compute_; }
  // Returns the stream of copies without an engine, one per direction.
  StreamHandle raw(CopyDirection direction) const {
    return direction == CopyDirection::kHostToDevice ? raw_h2d_ : raw_d2h_;
  }
  // Always idle: copies ordered after it wait for nothing.
  StreamHandle idle() const { return idle_; }
  double now_ms() const { return now_ms_(); }

  absl::StatusOr<std::shared_ptr<HostBuffer>> NewHostMemory(uint64_t size_bytes);
  // Allocates and frees on compute().
  absl::StatusOr<std::shared_ptr<void>> NewDeviceMemory(uint64_t size_bytes);

  absl::Status SynchronizeAll();

 private:
  CopyWorld(std::shared_ptr<Device> device, StreamHandle compute, std::function<double()> now_ms)
      : device_(std::move(device)), compute_(compute), now_ms_(std::move(now_ms)) {}

  const std::shared_ptr<Device> device_;
  const StreamHandle compute_;
  const std::function<double()> now_ms_;
  std::shared_ptr<TransferEngine> engine_;
  std::shared_ptr<PinnedAllocator> allocator_;
  StreamHandle raw_h2d_;
  StreamHandle raw_d2h_;
  StreamHandle idle_;
};

// Source and destination of one direction: pieces `device_stride_bytes` apart on the device and
// adjacent on the host.
struct CopyLane {
  CopyDirection direction = CopyDirection::kDeviceToHost;
  uint64_t pieces = 1;
  uint64_t piece_bytes = 0;
  uint64_t device_stride_bytes = 0;  // at least piece_bytes
  std::shared_ptr<HostBuffer> host;
  std::shared_ptr<void> device;

  uint64_t size_bytes() const { return pieces * piece_bytes; }
  std::vector<CopyPiece> Pieces() const { return PiecesFor(direction); }
  CopyBatch Batch() const;

  // Writes a pattern to the source and other bytes to the destination, and waits for both.
  absl::Status Prepare(CopyWorld& world) const;
  // Returns DataLoss unless the destination has the pattern. Call it when no copy is in flight.
  // Overwrites the host's bytes.
  absl::Status Verify(CopyWorld& world) const;

 private:
  char* HostPiece(uint64_t i) const { return static_cast<char*>(host->data()) + i * piece_bytes; }
  // Each piece begins with unique bytes.
  uint64_t PatternOffset(uint64_t i) const { return i * AlignUp(piece_bytes, 64 * kKiB); }
  void Fill(const TestPattern& pattern) const;
  std::vector<CopyPiece> PiecesFor(CopyDirection direction) const;
  absl::Status CopyNow(CopyWorld& world, CopyDirection direction) const;
};

// Returns a lane with its own memory. Device pieces are not adjacent, so that none are merged.
absl::StatusOr<CopyLane> NewLane(CopyWorld& world, CopyDirection direction, uint64_t pieces,
                                 uint64_t piece_bytes);

}  // namespace pinion

#endif  // PINION_BENCH_COPY_WORLD_H_
