// The device of one run: clock, memory and traffic, alike for emu and cuda.
//
// Thread safety: as the run that owns it: one thread.
// Ownership: tensors of the device must be gone before another Accelerator is opened.

#ifndef PINION_PROGRAMS_ACCELERATOR_H_
#define PINION_PROGRAMS_ACCELERATOR_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/trace/chrome_trace_sink.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/programs/run_options.h"

namespace pinion {

// Returns the folder of the loaded libtorch_cpu.so, which has LibTorch's other libraries.
std::string LoadedTorchLibDir();

// The places of this machine's CUDA.
struct CudaInstallation {
  std::string driver_file = "/proc/driver/nvidia/version";  // exists if there is a driver
  std::string torch_lib_dir = LoadedTorchLibDir();          // has libtorch_cuda.so
  const CudaApi& api = RealCudaApi();
};

// Returns the accelerator that `requested` names ("cuda:0", "emu:0"). Empty: "cuda:0" with a
// driver, else "emu:0". Loads LibTorch's CUDA libraries if needed. Errors name the driver or the
// library.
absl::StatusOr<std::string> ChooseDevice(const std::string& requested,
                                         const CudaInstallation& cuda = {});

// Makes CUDA's operators give the same bits in every run, or throw. Call it before the first
// operator, since cuBLAS reads its setting once.
void AskForRepeatableBits();

// Calls RegisterEmuDevice, which fails while tensors of the previous machine live. Autograd's
// workers free the last ones shortly after backward, so this waits up to 5 s.
absl::Status RegisterNextMachine(const std::shared_ptr<EmulatedMachine>& machine);

class Accelerator {
 public:
  // Registers a new emulated machine, or opens the CUDA device that ChooseDevice prepared.
  static absl::StatusOr<Accelerator> Open(const RunOptions& options);

  c10::Device device() const { return device_; }
  const DeviceBackend& backend() const { return backend_; }
  const std::shared_ptr<EmulatedMachine>& machine() const { return machine_; }  // null on cuda

  // Options for sharing the host tier. On emu the pool ignores the watermarks of host RAM, which
  // also contains the device's memory.
  HostTierOptions tier_options() const;

  // Receives the run's ranges, and on cuda its transfers. Null without a trace.
  std::shared_ptr<TraceSink> trace() const;
  // Discards the trace up to here, if there is one.
  void RestartTrace();

  void Synchronize();
  // Returns virtual time on emu, wall time on cuda.
  double now_ms() const;
  // Times in which operators ran, and in which they only waited for copies; nullopt on cuda.
  std::optional<double> compute_ms() const;
  std::optional<double> stalled_ms() const;
  uint64_t peak_bytes() const;  // since Open, or ResetPeak
  void ResetPeak();
  // Requires RunOptions::trace_path.
  absl::Status WriteTrace(const std::string& path) const;

 private:
  Accelerator(c10::Device device, DeviceBackend backend, std::shared_ptr<EmulatedMachine> machine)
      : device_(device), backend_(std::move(backend)), machine_(std::move(machine)) {}

  c10::Device device_;
  DeviceBackend backend_;
  std::shared_ptr<EmulatedMachine> machine_;
  std::shared_ptr<ChromeTraceSink> trace_;  // null on emu, whose machine keeps the timeline
};

}  // namespace pinion

#endif  // PINION_PROGRAMS_ACCELERATOR_H_
