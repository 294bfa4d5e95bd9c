// A CUDA runtime without a GPU: the functions of CudaApi on top of the emulated accelerator.
//
//   FakeCuda fake(EmulatedOptions{});
//   CudaDevice device(FakeCuda::Api(), 0);
//
// Streams and events are the emulated device's own handles; a null stream is the current device's
// default stream. It is as strict as CUDA at its worst:
//   * a stream is usable only while its device is current;
//   * a call makes a context on the device that is current, and cudaSetDevice on the one it names;
//   * an error stays latched on its thread until it is read; a sticky one is returned by every
//     later call of every thread (what others do on the machine itself, as LibTorch's kernels,
//     goes on);
//   * a copy may fault while it runs: its call succeeds, its bytes never arrive, a later call, of
//     whatever kind, tells, and the machine's devices are broken;
//   * a batch of copies that fails has enqueued half of its pieces, and one of more than
//     kMaxBatchPieces ends the process;
//   * a piece of a copy must not span two registrations, nor registered and other memory;
//   * registering or allocating host memory for a device that reads the host's page tables locks
//     nothing: the memory is pageable;
//   * a stream that is created while a green context is current belongs to that context;
//   * freeing and unregistering pinned memory wait for all that the device has to do;
//   * an allocation far beyond the device's memory is an invalid value, not a lack of memory;
//   * querying an event, waiting for a stream, pinning memory, and creating, destroying, allocating
//     or freeing anything while some stream captures a graph fails and spoils the capture, unless
//     the thread has relaxed its capture mode;
//   * so does whatever touches the legacy stream while a stream that synchronises with it captures.
//
// Thread safety: the API's functions are thread-safe. One FakeCuda at a time.

#ifndef PINION_TESTS_DEVICE_CUDA_FAKE_CUDA_H_
#define PINION_TESTS_DEVICE_CUDA_FAKE_CUDA_H_

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"

namespace pinion::testing {

class FakeCuda {
 public:
  // What a driver takes in one cudaMemcpyBatchAsync before it hangs.
  static constexpr size_t kMaxBatchPieces = 1024;

  explicit FakeCuda(const EmulatedOptions& options);
  // The runtime of a machine that others know, too.
  explicit FakeCuda(std::shared_ptr<EmulatedMachine> machine);
  ~FakeCuda();
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;

  // Calls go to the FakeCuda that lives.
  static const CudaApi& Api();
  // The same, of a runtime older than 12.8.
  static const CudaApi& ApiWithoutBatch();

  EmulatedMachine& machine() { return *machine_; }
  const std::shared_ptr<EmulatedMachine>& shared_machine() { return machine_; }

  // --- Faults ---
  // The next call of a function ("MemcpyAsync") fails with `error` and does nothing else.
  void FailNext(const std::string& function, cudaError_t error);
  // The same for the k-th call from now on, of whatever function; 1 is the next.
  void FailCall(uint64_t k, cudaError_t error);
  // The k-th copy from now on (a batch is one) faults while it runs. Up to `unnoticed_calls` later
  // submissions succeed before a call returns cudaErrorIllegalAddress; queries and synchronisations
  // notice at once.
  void FaultCopy(uint64_t k, int unnoticed_calls = 0);
  // What cudaGetDeviceCount returns where there is no driver.
  void SetNoDriver() { no_driver_ = true; }
  // What every cudaMemcpyBatchAsync returns: that of a driver without it.
  void RefuseBatches(cudaError_t error);
  // cudaHostAlloc returns memory on the boundary of a 4 KiB page from now on, and of no larger one.
  void AlignToPagesOnly() { pages_only_ = true; }
  // Devices have no memory but the host's.
  void SetIntegrated() { integrated_ = true; }
  // Every device has this address on the bus; none has one otherwise.
  void SetBusId(const std::string& bus_id) { bus_id_ = bus_id; }
  // The program makes a green context current on all threads, on top of what they select.
  void SetGreenContext() { has_green_context_ = true; }
  // Devices see registered memory at other addresses than the host does.
  void SetRegisteredElsewhere() { registered_elsewhere_ = true; }
  void SetCapturing(StreamHandle stream, bool capturing);
  // A stream of the program's that is not a non-blocking one captures a graph.
  void SetBlockingStreamCaptures() { blocking_stream_captures_ = true; }
  // From now on a new stream gets the handle of the one that was destroyed last.
  void RecycleStreamHandles() { recycles_handles_ = true; }
  // Runs a kernel at its launch, on the host; without one the fake has no code of GPUs. Its time is
  // what it submits to the machine itself.
  void SetKernel(std::function<cudaError_t(void** arguments, StreamHandle stream)> kernel) {
    kernel_ = std::move(kernel);
  }
  // As while a process exits: from now on every call fails with cudaErrorCudartUnloading.
  void Unload();

  // --- What the program did ---
  bool capture_spoiled() const;
  int calls(const std::string& function) const;
  // Of all functions that can fail, the failed calls included.
  uint64_t all_calls() const;
  uint64_t calls_after_unload() const;
  // The function of the call that FailCall or FaultCopy hit; "" while none was hit.
  std::string failed_function() const;
  void ForgetFailedCall();
  bool has_context(int device) const;
  // Streams that a green context owns.
  int green_streams() const { return green_streams_; }
  // The CPUs that the thread could run on in the last cudaHostAlloc.
  const cpu_set_t& pinning_cpus() const { return pinning_cpus_; }
  // Streams, events and libraries that are not destroyed; pinned and registered segments that are
  // not freed.
  size_t live_handles() const;
  size_t live_segments() const;

  // --- What the functions of the table do; `function` is their name in CudaApi ---
  struct ThreadState {
    int device() const { return pushed.empty() ? selected : pushed.back(); }

    int selected = 0;         // by cudaSetDevice
    std::vector<int> pushed;  // contexts, on top of it
    cudaError_t last_error = cudaSuccess;
    cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  };
  static ThreadState& thread();
  static FakeCuda& Get();
  static bool IsSticky(cudaError_t error);
  Device& current();
  StreamHandle Stream(cudaStream_t stream);
  absl::StatusOr<cudaStream_t> CreateStream();
  absl::Status DestroyStream(cudaStream_t stream);
  void AddContext(int device);
  // Counts a call. Its error, if it is to fail.
  cudaError_t Enter(const char* function, bool uses_device = true);
  // The same for a call that knows nothing of broken devices: it is about the thread alone.
  cudaError_t EnterThread(const char* function);
  // The same for a call of the driver's, whose errors are not latched.
  cudaError_t EnterDriver(const char* function);
  // The error of FailNext alone, for a call that is not counted.
  cudaError_t TakeNext(const char* function);
  // cudaErrorStreamCaptureImplicit for the legacy stream while a stream that synchronises with it
  // captures.
  cudaError_t CheckLegacy(cudaStream_t stream) const;
  // The same for a call that would use the stream: it spoils that capture.
  cudaError_t UseLegacy(cudaStream_t stream);
  // Enter for a call that a capture does not tolerate.
  cudaError_t EnterUnsafe(const char* function);
  // The same for work that is submitted. *lost: the device is broken and nobody has noticed, so the
  // call succeeds and does nothing.
  cudaError_t EnterSubmission(const char* function, bool* lost);
  // The same for a copy.
  cudaError_t EnterCopy(const char* function, bool* lost);
  cudaError_t batch_refusal() const;
  // Latches the error that a status means, and returns it.
  cudaError_t Latch(const absl::Status& status);
  cudaError_t Latch(cudaError_t error);
  bool no_driver() const { return no_driver_; }
  const auto& kernel() const { return kernel_; }
  bool registered_elsewhere() const { return registered_elsewhere_; }
  bool integrated() const { return integrated_; }
  const std::string& bus_id() const { return bus_id_; }
  void AddHandle(void* handle);
  void RemoveHandle(void* handle);
  // As GH200: all that hangs on NVLink-C2C.
  bool ReadsHostPageTables(int device);
  absl::Status HostAlloc(void** data, size_t size_bytes);
  absl::Status FreeHost(void* data);
  absl::Status HostRegister(void* data, size_t size_bytes);
  absl::Status HostUnregister(void* data);

 private:
  void Count(const char* function) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  cudaError_t Injected(const char* function) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::shared_ptr<EmulatedMachine> machine_;
  std::function<cudaError_t(void**, StreamHandle)> kernel_;
  bool no_driver_ = false;
  bool pages_only_ = false;
  bool registered_elsewhere_ = false;
  bool integrated_ = false;
  bool has_green_context_ = false;
  std::atomic<int> green_streams_ = 0;
  std::string bus_id_;
  cpu_set_t pinning_cpus_ = {};
  bool blocking_stream_captures_ = false;
  bool recycles_handles_ = false;
  mutable Mutex mu_;
  cudaError_t sticky_ ABSL_GUARDED_BY(mu_) = cudaSuccess;
  bool faulted_ ABSL_GUARDED_BY(mu_) = false;  // a copy has, and nobody has noticed
  int unnoticed_calls_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t fault_copy_in_ ABSL_GUARDED_BY(mu_) = 0;  // 0: never
  uint64_t fail_call_in_ ABSL_GUARDED_BY(mu_) = 0;   // 0: never
  cudaError_t fail_call_with_ ABSL_GUARDED_BY(mu_) = cudaSuccess;
  std::map<std::string, cudaError_t> fail_next_ ABSL_GUARDED_BY(mu_);
  cudaError_t batch_refusal_ ABSL_GUARDED_BY(mu_) = cudaSuccess;
  std::map<std::string, int> calls_ ABSL_GUARDED_BY(mu_);
  uint64_t all_calls_ ABSL_GUARDED_BY(mu_) = 0;
  bool unloaded_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t calls_after_unload_ ABSL_GUARDED_BY(mu_) = 0;
  std::string failed_function_ ABSL_GUARDED_BY(mu_);
  std::set<void*> handles_ ABSL_GUARDED_BY(mu_);
  std::set<int> contexts_ ABSL_GUARDED_BY(mu_);
  std::vector<cudaStream_t> free_handles_ ABSL_GUARDED_BY(mu_);
  std::map<cudaStream_t, StreamHandle> recycled_ ABSL_GUARDED_BY(mu_);  // the machine's stream
  std::map<void*, HostSegment> pinned_ ABSL_GUARDED_BY(mu_);
  const std::shared_ptr<HostMemorySource> pageable_;
  std::set<void*> registered_ ABSL_GUARDED_BY(mu_);
  int capturing_ ABSL_GUARDED_BY(mu_) = 0;
  bool capture_spoiled_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_DEVICE_CUDA_FAKE_CUDA_H_
