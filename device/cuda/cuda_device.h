// A CUDA device behind device.h.
//
// Every call makes its device current and restores the one that the calling thread had. Streams are
// non-blocking ones. Device memory comes from the device's default pool
// (cudaMallocAsync): LibTorch programs use it only where Pinion itself needs memory.
//
// The pieces of a copy go one by one. PINION_COPY_BATCH=1 in the environment asks for the batch
// call: then those of less than 1 MiB go in one cudaMemcpyBatchAsync for every 1024 of them where
// the runtime and the driver have it (a runtime of 12.8 or newer also runs on drivers that lack
// the call, and only the first call tells).
// CUDA does not say how much of a failed batch was enqueued, so a failed copy of several pieces
// waits for the stream: nothing is written later. Pieces are split where the host's memory may be
// two registrations (cuda_registered_source.h).
//
// Thread safety: thread-safe, as the runtime is.

#ifndef PINION_DEVICE_CUDA_CUDA_DEVICE_H_
#define PINION_DEVICE_CUDA_CUDA_DEVICE_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

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
  // Makes this device current, calls, and puts both the result and the thread right again.
  template <typename Function>
  absl::Status Call(const char* name, const Function& function) const;
  // The same for a call that may be unsafe while another stream captures a graph.
  template <typename Function>
  absl::Status CallRelaxed(const char* name, const Function& function) const;
  absl::StatusOr<EventHandle> NewEvent(unsigned int flags);
  absl::Status CopyPieces(CopyDirection direction, std::vector<CopyPiece> pieces,
                          cudaStream_t stream);
  // How many of the pieces, the first ones, the driver has taken: fewer than all where it has no
  // batch call.
  absl::StatusOr<size_t> CopyInBatches(absl::Span<const CopyPiece> pieces, cudaStream_t stream);
  // False: the driver has no such call.
  absl::StatusOr<bool> CopyInBatch(absl::Span<const CopyPiece> pieces, cudaStream_t stream);

  const CudaApi& api_;
  const int index_;
  const std::shared_ptr<HostMemorySource> pinned_source_;
  std::atomic<bool> has_batch_;  // falls once the driver has refused it
};

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_DEVICE_H_
