// A CUDA runtime without a GPU: the functions of CudaApi on top of the emulated accelerator.
//
//   FakeCuda fake(EmulatedOptions{});
//   CudaDevice device(FakeCuda::Api(), 0);
//
// Streams and events are the emulated device's own handles; a null stream is the current device's
// default stream. It is as strict as CUDA at its worst: a stream is usable only while its device is
// current, errors stay latched per thread until they are read, sticky ones for ever, and querying
// an event or pinning memory while some stream captures a graph fails and spoils the capture,
// unless the thread has relaxed its capture mode.
//
// Thread safety: the API's functions are thread-safe. One FakeCuda at a time.

#ifndef PINION_TESTS_DEVICE_CUDA_FAKE_CUDA_H_
#define PINION_TESTS_DEVICE_CUDA_FAKE_CUDA_H_

#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"

namespace pinion::testing {

class FakeCuda {
 public:
  explicit FakeCuda(const EmulatedOptions& options);
  ~FakeCuda();
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;

  // Calls go to the FakeCuda that lives.
  static const CudaApi& Api();
  // The same, of a runtime older than 12.8.
  static const CudaApi& ApiWithoutBatch();

  EmulatedMachine& machine() { return *machine_; }
  const std::shared_ptr<EmulatedMachine>& shared_machine() { return machine_; }

  // The next call of a function ("MemcpyAsync") fails with `error` and does nothing else.
  void FailNext(const std::string& function, cudaError_t error);
  // What cudaGetDeviceCount returns where there is no driver.
  void SetNoDriver() { no_driver_ = true; }
  // cudaHostAlloc returns memory on the boundary of a 4 KiB page from now on, and of no larger one.
  void AlignToPagesOnly() { pages_only_ = true; }
  void SetCapturing(StreamHandle stream, bool capturing);
  bool capture_spoiled() const;
  int calls(const std::string& function) const;

  // --- What the functions of the table do; `function` is their name in CudaApi ---
  static FakeCuda& Get();
  Device& current();
  StreamHandle Stream(cudaStream_t stream);
  // Counts a call. Its error, if it is to fail.
  cudaError_t Enter(const char* function);
  // The same for a call that a capture does not tolerate.
  cudaError_t EnterUnsafe(const char* function);
  // Latches the error that a status means, and returns it.
  static cudaError_t Latch(const absl::Status& status);
  static cudaError_t Latch(cudaError_t error);
  bool no_driver() const { return no_driver_; }
  absl::Status HostAlloc(void** data, size_t size_bytes);
  absl::Status FreeHost(void* data);

 private:
  const std::shared_ptr<EmulatedMachine> machine_;
  bool no_driver_ = false;
  bool pages_only_ = false;
  mutable Mutex mu_;
  std::map<std::string, cudaError_t> fail_next_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, int> calls_ ABSL_GUARDED_BY(mu_);
  std::map<void*, HostSegment> pinned_ ABSL_GUARDED_BY(mu_);
  int capturing_ ABSL_GUARDED_BY(mu_) = 0;
  bool capture_spoiled_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_DEVICE_CUDA_FAKE_CUDA_H_
