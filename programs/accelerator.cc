#include "pinion/programs/accelerator.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <link.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/trace/chrome_trace_sink.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/programs/pool_options.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

// More than any model here needs: the emulated device then has no limit.
constexpr uint64_t kUnlimitedBytes = uint64_t{64} << 30;

constexpr char kEmulated[] = "emu:0";

constexpr char kEmulatedRemedy[] = "; --device=emu:0 trains on the emulated device";

// Of RegisterNextMachine.
constexpr int kAttempts = 500;
constexpr absl::Duration kPause = absl::Milliseconds(10);

// Returns the loader's error, which names the library; empty if it loads.
std::string WhyNotLoaded(const std::string& library, int flags) {
  if (dlopen(library.c_str(), flags) != nullptr) return "";
  const char* reason = dlerror();
  return reason == nullptr ? library : reason;
}

// Loaded first: LibTorch caches the absence of CUDA.
absl::Status LoadTorchCuda(const std::string& torch_lib_dir) {
  const std::string path = absl::StrCat(torch_lib_dir, "/libtorch_cuda.so");
  const std::string reason = WhyNotLoaded(path, RTLD_NOW | RTLD_GLOBAL);
  if (reason.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("cannot load ", path, " (", reason,
                   "): install LibTorch with its CUDA libraries (pip install torch==" TORCH_VERSION
                   " in .venv), or name ",
                   "one with TORCH_PATH, which ./bazelw and programs in a portable folder read",
                   kEmulatedRemedy));
}

absl::Status CannotUseCuda(const absl::Status& why) {
  const std::string reason = WhyNotLoaded("libcuda.so.1", RTLD_LAZY);
  return absl::Status(
      why.code(), absl::StrCat(why.message(), reason.empty() ? "" : "; ", reason, kEmulatedRemedy));
}

}  // namespace

std::string LoadedTorchLibDir() {
  void* const library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  PINION_CHECK(library != nullptr) << "libtorch_cpu.so is not loaded: " << dlerror();
  const link_map* map = nullptr;
  PINION_CHECK(dlinfo(library, RTLD_DI_LINKMAP, &map) == 0) << dlerror();
  // Bazel loads a link; the other libraries lie beside its target.
  std::error_code error;
  const std::filesystem::path path = std::filesystem::canonical(map->l_name, error);
  dlclose(library);
  return path.parent_path().string();
}

absl::StatusOr<std::string> ChooseDevice(const std::string& requested,
                                         const CudaInstallation& cuda) {
  if (requested == kEmulated) return requested;
  int index = 0;
  const bool wants_cuda = absl::StartsWith(requested, "cuda:") &&
                          absl::SimpleAtoi(requested.substr(5), &index) && index >= 0;
  if (!requested.empty() && !wants_cuda) {
    return absl::InvalidArgumentError(
        absl::StrCat("--device=", requested, " is neither cuda:N nor ", kEmulated));
  }
  const absl::StatusOr<int> count = CudaDeviceCount(cuda.api);
  std::error_code ignored;
  const bool has_driver = count.ok() || std::filesystem::exists(cuda.driver_file, ignored);
  if (requested.empty() && !has_driver) return kEmulated;
  if (!count.ok()) return CannotUseCuda(count.status());
  if (index >= *count) {
    return absl::NotFoundError(absl::StrCat("--device=", requested, ": this machine has ", *count,
                                            " CUDA devices", kEmulatedRemedy));
  }
  PINION_RETURN_IF_ERROR(LoadTorchCuda(cuda.torch_lib_dir));
  return absl::StrCat("cuda:", index);
}

void AskForRepeatableBits() {
  // Repeatable bits need cuBLAS workspaces of a fixed size; a user's setting stays.
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  // With warn_only, attention's backward would take an algorithm that does not repeat its bits.
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

absl::Status RegisterNextMachine(const std::shared_ptr<EmulatedMachine>& machine) {
  absl::Status registered = RegisterEmuDevice(machine);
  for (int i = 0; i < kAttempts && absl::IsFailedPrecondition(registered); ++i) {
    absl::SleepFor(kPause);
    registered = RegisterEmuDevice(machine);
  }
  return registered;
}

absl::StatusOr<Accelerator> Accelerator::Open(const RunOptions& options) {
  if (options.device != kEmulated) {
    const c10::Device device(options.device);
    at::globalContext().lazyInitDevice(device.type());
    c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
    Accelerator accelerator(device, CudaBackend(), nullptr);
    if (!options.trace_path.empty()) accelerator.trace_ = std::make_shared<ChromeTraceSink>();
    return accelerator;
  }
  EmulatedOptions emulated;
  emulated.memory_bytes = std::min(options.device_memory_bytes, kUnlimitedBytes);
  emulated.preset = options.preset;
  emulated.seed = options.seed;
  emulated.record_trace = !options.trace_path.empty();
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<EmulatedMachine> machine,
                          EmulatedMachine::Create(emulated));
  PINION_RETURN_IF_ERROR(RegisterNextMachine(machine));
  return Accelerator(c10::Device(kEmulated), EmulatedBackend(machine), machine);
}

HostTierOptions Accelerator::tier_options() const {
  HostTierOptions tier;
  tier.engine.trace = trace();
  if (machine_ != nullptr) tier.allocator = PoolWithoutWatermarks();
  return tier;
}

void Accelerator::Synchronize() {
  c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
}

double Accelerator::now_ms() const {
  if (machine_ != nullptr) return machine_->now_ms();
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::optional<double> Accelerator::compute_ms() const {
  if (machine_ == nullptr) return std::nullopt;
  return machine_->time_stats(device_.index()).compute_busy_ms;
}

std::optional<double> Accelerator::stalled_ms() const {
  if (machine_ == nullptr) return std::nullopt;
  return machine_->time_stats(device_.index()).stalled_on_copies_ms;
}

uint64_t Accelerator::peak_bytes() const {
  if (machine_ != nullptr) return machine_->memory_stats(device_.index()).peak_bytes;
  constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return c10::getDeviceAllocator(device_.type())
      ->getDeviceStats(device_.index())
      .allocated_bytes[kAggregate]
      .peak;
}

void Accelerator::ResetPeak() {
  if (machine_ != nullptr) return machine_->ResetPeakMemory(device_.index());
  c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
}

std::shared_ptr<TraceSink> Accelerator::trace() const {
  return machine_ != nullptr ? machine_->trace() : trace_;
}

void Accelerator::RestartTrace() {
  if (machine_ != nullptr) machine_->RestartTrace();
  if (trace_ != nullptr) trace_->Restart();
}

absl::Status Accelerator::WriteTrace(const std::string& path) const {
  if (machine_ != nullptr) return machine_->WriteChromeTrace(path);
  PINION_CHECK(trace_ != nullptr) << "nobody has asked for a timeline of " << device_.str();
  return trace_->Write(path);
}

}  // namespace pinion
