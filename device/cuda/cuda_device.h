// A CUDA GPU as a Device: streams, events, cudaMallocAsync memory and cudaMemcpyAsync copies.
//
// Each call makes its device current and restores the calling thread's device. Streams are
// non-blocking. Device memory comes from the device's default pool. LibTorch programs use that pool
// only for memory that Pinion itself needs.
//
// A copy makes one cudaMemcpyAsync call per piece. If a copy of several pieces fails, CopyAsync
// waits for the stream, because it has enqueued the pieces before the failed one.
//
// Thread safety: thread-safe, like the CUDA runtime.

#ifndef PINION_DEVICE_CUDA_CUDA_DEVICE_H_
#define PINION_DEVICE_CUDA_CUDA_DEVICE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/device.h"

namespace pinion {

// `api` outlives the device. The caller has checked that `index` exists (cuda_backend.h).
class CudaDevice final : public Device {
 public:
  CudaDevice(const CudaApi& api, int index);

  std::string name() const override;
  int index() const override { return index_; }
  DeviceInfo info() const override;

  absl::StatusOr<void*> Allocate(uint64_t size_bytes, StreamHandle stream) override;
  absl::Status Free(void* data, StreamHandle stream) override;
  std::shared_ptr<HostMemorySource> pinned_source() override { return pinned_source_; }

  absl::StatusOr<StreamHandle> CreateStream(const std::string& name) override;
  absl::Status DestroyStream(StreamHandle stream) override;
  absl::Status SynchronizeStream(StreamHandle stream) override;
  absl::StatusOr<bool> IsCapturing(StreamHandle stream) override;

  absl::StatusOr<EventHandle> CreateEvent() override;
  absl::StatusOr<EventHandle> CreateTimedEvent() override;
  absl::Status DestroyEvent(EventHandle event) override;
  absl::Status RecordEvent(EventHandle event, StreamHandle stream) override;
  absl::Status StreamWaitEvent(StreamHandle stream, EventHandle event) override;
  absl::StatusOr<bool> QueryEvent(EventHandle event) override;
  absl::Status WaitEvent(EventHandle event, absl::Duration timeout) override;

  absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle end) override;

  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override;

 private:
  // Calls `function` with this device current and converts its error. Restores the thread's device.
  template <typename Function>
  absl::Status Call(const char* name, const Function& function) const;
  // Like Call, for functions that CUDA considers unsafe while another stream captures a graph.
  template <typename Function>
  absl::Status CallRelaxed(const char* name, const Function& function) const;
  absl::StatusOr<EventHandle> NewEvent(unsigned int flags);

  const CudaApi& api_;
  const int index_;
  const std::shared_ptr<HostMemorySource> pinned_source_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_DEVICE_H_
