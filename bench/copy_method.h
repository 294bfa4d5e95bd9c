// Copies of engine_bench: by the device's calls, by the engine, or packed by the device into one.
//
//   PINION_ASSIGN_OR_RETURN(const auto world, CopyWorld::Create(device, compute, now_ms));
//   PINION_ASSIGN_OR_RETURN(const auto method, NewCopies(*world, of));
//   PINION_ASSIGN_OR_RETURN(const BenchTime time, TimeCopies(*world, *method, of.transfers));
//   PINION_RETURN_IF_ERROR(method->Verify());
//
// The device may be any: emulated, CUDA's, or one that does nothing.
//
// Thread safety: none.
// Ownership: memory and lanes share ownership of what they need and may outlive the world. Methods
// borrow the world.

#ifndef PINION_BENCH_COPY_METHOD_H_
#define PINION_BENCH_COPY_METHOD_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/bench/engine_cases.h"
#include "pinion/device/device.h"
#include "pinion/engine/copy_batch.h"
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

class CopyMethod {
 public:
  virtual ~CopyMethod() = default;
  // Enqueues one transfer per lane behind the current work of `after`.
  virtual absl::Status Submit(StreamHandle after) = 0;
  // Blocks until the last byte has arrived.
  virtual absl::Status Wait() = 0;
  virtual absl::Status Verify() = 0;
};

// Returns copies by one device call per piece (kRaw, which orders nothing after world.idle()) or by
// one TransferEngine::Submit per direction.
absl::StatusOr<std::unique_ptr<CopyMethod>> NewCopies(CopyWorld& world, const BenchCase& of);

// Returns copies of many small pieces as one: gathered on the device on the way out; one fetch with
// views on the way in. `of` has one direction. LibTorch's current stream must be the world's
// compute stream. Throws LibTorch's errors.
absl::StatusOr<std::unique_ptr<CopyMethod>> NewPackedCopies(CopyWorld& world, c10::Device device,
                                                            const BenchCase& of);

// Logs a warning that `what` leaks, unless it was freed.
void WarnOfLeak(const char* what, const absl::Status& freed);

// Times `transfers` transfers back to back.
absl::StatusOr<BenchTime> TimeCopies(CopyWorld& world, CopyMethod& method, uint64_t transfers);

}  // namespace pinion

#endif  // PINION_BENCH_COPY_METHOD_H_
