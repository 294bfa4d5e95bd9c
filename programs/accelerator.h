// The device of one run: its clock, its memory, its traffic, alike on emu and on cuda.
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

// The folder of the libtorch_cpu.so that this process has loaded: the other libraries of the same
// LibTorch lie there.
std::string LoadedTorchLibDir();

// Where this machine's CUDA is looked for.
struct CudaInstallation {
  std::string driver_file = "/proc/driver/nvidia/version";  // exists where there is a driver
  std::string torch_lib_dir = LoadedTorchLibDir();          // has libtorch_cuda.so
  const CudaApi& api = RealCudaApi();
};

// The accelerator that `requested` names ("cuda:0", "emu:0"), or where it is empty the best that
// there is: "cuda:0" with a driver, else "emu:0". Loads LibTorch's CUDA libraries where they are
// needed. A driver or a library that cannot be used is an error that names it.
absl::StatusOr<std::string> ChooseDevice(const std::string& requested,
                                         const CudaInstallation& cuda = {});

// From here on CUDA's operators give the same bits on every run, or throw that they cannot. Before
// the first of them: cuBLAS looks once.
void AskForRepeatableBits();

class Accelerator {
 public:
  // Registers a fresh emulated machine, or takes the CUDA device that ChooseDevice has prepared.
  static absl::StatusOr<Accelerator> Open(const RunOptions& options);

  c10::Device device() const { return device_; }
  const DeviceBackend& backend() const { return backend_; }
  const std::shared_ptr<EmulatedMachine>& machine() const { return machine_; }  // null on cuda

  // For whoever shares its host tier. On emu the pool ignores the marks of the host's RAM, where
  // the device's own memory is as well.
  HostTierOptions tier_options() const;

  // Where the run's ranges are told to, and on cuda its transfers. Null without a trace.
  std::shared_ptr<TraceSink> trace() const;
  // Forgets what was before, if there is a trace.
  void RestartTrace();

  void Synchronize();
  // Virtual time on emu, wall time on cuda.
  double now_ms() const;
  // For which operators ran, and for which they only waited for copies; unknown on cuda.
  std::optional<double> compute_ms() const;
  std::optional<double> stalled_ms() const;
  uint64_t peak_bytes() const;  // since Open, or ResetPeak
  void ResetPeak();
  // RunOptions::trace_path was given.
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
