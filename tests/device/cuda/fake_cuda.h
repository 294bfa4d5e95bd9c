// A CUDA runtime without a GPU: implements CudaApi on the emulated accelerator.
//
//   FakeCuda fake(EmulatedOptions{});
//   CudaDevice device(FakeCuda::Api(), 0);
//
// Streams and events are the emulated device's handles; a null stream is the current device's
// default stream. The fake is as strict as the strictest CUDA runtime and driver:
//   * a stream is usable only while its device is current;
//   * use of a stream or an event after it was destroyed ends the process;
//   * a call creates a context on the current device, and cudaSetDevice on the named one;
//   * cudaSetDevice replaces the thread's green context by the device's own;
//   * an error stays latched on its thread until it is read;
//   * every later call of any thread returns a sticky error. Work that other code submits to the
//     machine itself, such as LibTorch's kernels, continues;
//   * a copy may fault while it runs: its call succeeds and its bytes never arrive. A later call
//     of any kind reports the fault, and the machine's devices are broken;
//   * allocating host memory locks nothing if the device reads the host's page tables: the memory
//     is pageable;
//   * a stream or event that is created while a green context is current belongs to that context,
//     and an event is not recorded on a stream of another context;
//   * freeing pinned memory waits for all work of the device;
//   * an allocation far beyond the device's memory is an invalid value, not a lack of memory;
//   * while a stream captures a graph, many calls fail and spoil the capture: querying an event,
//     waiting for a stream, pinning memory, and creating, destroying, allocating or freeing
//     anything, a device's context included. Exception: a thread that has relaxed its capture mode;
//   * so does any use of the legacy stream while a stream that synchronizes with it captures.
//
// Thread safety: the API's functions are thread-safe. At most one FakeCuda exists at a time.

#ifndef PINION_TESTS_DEVICE_CUDA_FAKE_CUDA_H_
#define PINION_TESTS_DEVICE_CUDA_FAKE_CUDA_H_

#include <sched.h>

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
  explicit FakeCuda(const EmulatedOptions& options);
  // Uses a machine that is shared with other code.
  explicit FakeCuda(std::shared_ptr<EmulatedMachine> machine);
  ~FakeCuda();
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;

  // Returns functions that call the existing FakeCuda.
  static const CudaApi& Api();

  EmulatedMachine& machine() { return *machine_; }
  const std::shared_ptr<EmulatedMachine>& shared_machine() { return machine_; }

  // --- Faults ---
  // Makes the next call of a function (e.g. "MemcpyAsync") fail with `error` and do nothing else.
  void FailNext(const std::string& function, cudaError_t error);
  // Makes the k-th call from now on fail, of whichever function; 1 is the next.
  void FailCall(uint64_t k, cudaError_t error);
  // Makes the k-th copy from now on fault while it runs. Up to `unnoticed_calls` later submissions
  // succeed before one returns cudaErrorIllegalAddress. Queries and synchronizations return it at
  // once.
  void FaultCopy(uint64_t k, int unnoticed_calls = 0);
  // Makes cudaGetDeviceCount report that there is no driver.
  void SetNoDriver() { no_driver_ = true; }
  // Makes cudaHostAlloc align memory to 4 KiB only.
  void AlignToPagesOnly() { pages_only_ = true; }
  // Makes the devices integrated: they use the host's memory.
  void SetIntegrated() { integrated_ = true; }
  // Sets the bus address of a device; without it the device has none.
  void SetBusId(int device, const std::string& bus_id) { bus_ids_[device] = bus_id; }
  // Makes a green context of the selected device current on this thread, until the thread selects a
  // device.
  void SetGreenContext() { thread().has_green_context = true; }
  // Returns whether that context is current on this thread.
  static bool green_is_current() { return thread().has_green_context && thread().pushed.empty(); }
  void SetCapturing(StreamHandle stream, bool capturing);
  // Lets a stream that synchronizes with the legacy stream capture a graph.
  void SetBlockingStreamCaptures() { blocking_stream_captures_ = true; }
  // Gives each new stream the handle of the stream that was destroyed last.
  void RecycleStreamHandles() { recycles_handles_ = true; }
  // Makes every later call fail with cudaErrorCudartUnloading, as during process exit.
  void Unload();

  // --- Observations ---
  bool capture_spoiled() const;
  int calls(const std::string& function) const;
  // Returns the number of calls of all functions that can fail, including failed calls.
  uint64_t all_calls() const;
  uint64_t calls_after_unload() const;
  // Returns the function that FailCall or FaultCopy hit, or "" if none was hit yet.
  std::string failed_function() const;
  bool has_context(int device) const;
  // Returns the number of streams that a green context owns.
  size_t green_streams() const;
  // Returns the CPUs on which the thread of the last cudaHostAlloc could run.
  const cpu_set_t& pinning_cpus() const { return pinning_cpus_; }
  // Return the streams and events that are not destroyed, and the pinned segments that are not
  // freed.
  size_t live_handles() const;
  size_t live_segments() const;

  // --- Implementation of the table's functions; `function` is a name in CudaApi ---
  struct ThreadState {
    int device() const { return pushed.empty() ? selected : pushed.back(); }

    int selected = 0;                // by cudaSetDevice
    bool has_green_context = false;  // above the selected device
    std::vector<int> pushed;         // contexts above both
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
  EventHandle Event(cudaEvent_t event);
  absl::Status DestroyEvent(cudaEvent_t event);
  // Creates the device's context if it has none. Returns the error that CUDA returns during a
  // capture, which it spoils.
  cudaError_t AddContext(int device);
  // Counts a call and returns its injected error.
  cudaError_t Enter(const char* function, bool uses_device = true);
  // Like Enter, for a call that concerns only the thread and ignores broken devices.
  cudaError_t EnterThread(const char* function);
  // Like Enter, for a driver call, whose errors are not latched.
  cudaError_t EnterDriver(const char* function);
  // Returns the error of FailNext, for a call that is not counted.
  cudaError_t TakeNext(const char* function);
  // Returns cudaErrorStreamCaptureImplicit for the legacy stream while a stream that synchronizes
  // with it captures.
  cudaError_t CheckLegacy(cudaStream_t stream) const;
  // Like CheckLegacy, for a call that uses the stream; spoils that capture.
  cudaError_t UseLegacy(cudaStream_t stream);
  // Like Enter, for a call that a capture does not tolerate.
  cudaError_t EnterUnsafe(const char* function);
  // Like Enter, for submitted work. Sets *lost if the device is broken and no call has reported it
  // yet: the call then succeeds and does nothing.
  cudaError_t EnterSubmission(const char* function, bool* lost);
  // Like EnterSubmission, for a copy.
  cudaError_t EnterCopy(const char* function, bool* lost);
  // Latches and returns the error for a status.
  cudaError_t Latch(const absl::Status& status);
  cudaError_t Latch(cudaError_t error);
  bool no_driver() const { return no_driver_; }
  bool integrated() const { return integrated_; }
  const std::string& bus_id(int device) { return bus_ids_[device]; }
  void AddEvent(cudaEvent_t event);
  bool HaveOneContext(cudaEvent_t event, cudaStream_t stream) const;
  // Returns true for devices on NVLink-C2C, such as GH200.
  bool ReadsHostPageTables(int device);
  absl::Status HostAlloc(void** data, size_t size_bytes);
  absl::Status FreeHost(void* data);

 private:
  // Returns true, and spoils the capture, if this thread may make no unsafe call.
  bool SpoilsCapture() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns the error of FailNext.
  cudaError_t Next(const char* function) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Count(const char* function) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  cudaError_t Injected(const char* function) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::shared_ptr<EmulatedMachine> machine_;
  bool no_driver_ = false;
  bool pages_only_ = false;
  bool integrated_ = false;
  std::map<int, std::string> bus_ids_;  // by device
  cpu_set_t pinning_cpus_ = {};
  bool blocking_stream_captures_ = false;
  bool recycles_handles_ = false;
  mutable Mutex mu_;
  cudaError_t sticky_ ABSL_GUARDED_BY(mu_) = cudaSuccess;
  bool faulted_ ABSL_GUARDED_BY(mu_) = false;  // a copy has faulted, unreported
  int unnoticed_calls_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t fault_copy_in_ ABSL_GUARDED_BY(mu_) = 0;  // 0: never
  uint64_t fail_call_in_ ABSL_GUARDED_BY(mu_) = 0;   // 0: never
  cudaError_t fail_call_with_ ABSL_GUARDED_BY(mu_) = cudaSuccess;
  // std::less<>: finding a name allocates nothing, for tests with a full heap.
  std::map<std::string, cudaError_t, std::less<>> fail_next_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, int, std::less<>> calls_ ABSL_GUARDED_BY(mu_);
  uint64_t all_calls_ ABSL_GUARDED_BY(mu_) = 0;
  bool unloaded_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t calls_after_unload_ ABSL_GUARDED_BY(mu_) = 0;
  std::string failed_function_ ABSL_GUARDED_BY(mu_);
  std::set<void*> handles_ ABSL_GUARDED_BY(mu_);
  std::set<void*> destroyed_ ABSL_GUARDED_BY(mu_);
  std::set<void*> green_streams_ ABSL_GUARDED_BY(mu_);
  std::set<void*> green_events_ ABSL_GUARDED_BY(mu_);
  std::set<int> contexts_ ABSL_GUARDED_BY(mu_);
  std::vector<cudaStream_t> free_handles_ ABSL_GUARDED_BY(mu_);
  std::map<cudaStream_t, StreamHandle> recycled_ ABSL_GUARDED_BY(mu_);  // the machine's stream
  std::map<void*, HostSegment> pinned_ ABSL_GUARDED_BY(mu_);
  const std::shared_ptr<HostMemorySource> pageable_;
  int capturing_ ABSL_GUARDED_BY(mu_) = 0;
  bool capture_spoiled_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_DEVICE_CUDA_FAKE_CUDA_H_
