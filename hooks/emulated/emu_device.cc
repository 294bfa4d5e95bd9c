#include "pinion/hooks/emulated/emu_device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_nested_tensor_size_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/check.h"
#include "pinion/hooks/emulated/emu_allocator.h"
#include "pinion/hooks/emulated/emu_autocast.h"
#include "pinion/hooks/emulated/emu_fallback.h"
#include "pinion/hooks/emulated/emu_guard.h"
#include "pinion/hooks/emulated/emu_hooks.h"
#include "pinion/hooks/emulated/emu_memory_ops.h"
#include "pinion/hooks/emulated/emu_nn_ops.h"
#include "pinion/hooks/emulated/emu_pinned.h"
#include "pinion/hooks/emulated/emu_state.h"

namespace pinion {
namespace {

using c10::DispatchKey;

// Registrations last as long as their library, so it is never destroyed.
torch::Library& NewLibrary(const char* name_space, DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, name_space, key, __FILE__, __LINE__);
}

// Operators that RegisterOverComposites leaves out, or for which it would choose another kernel.
void RegisterByName(torch::Library& library) {
  for (const char* name :
       {// They would look for a convolution of the backend's own.
        "convolution", "convolution_backward", "_convolution",
        // One kernel on CUDA, where the composite one has a kernel for each tensor.
        "_foreach_copy_",
        // The composite one makes a nested tensor of the device's memory, which is refused here.
        "_nested_tensor_from_tensor_list",
        // The CPU's out= variants resize their output on the way, and LibTorch warns of it.
        "mse_loss", "smooth_l1_loss"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&emu::RunOnHost>());
  }
}

bool IsMutable(const c10::OperatorHandle& op) { return op.schema().is_mutable(); }

// LibTorch's backend-independent kernels precede a backend's fallback and may give other bits than
// the CPU's kernels. Where the CPU has a kernel, the fallback is registered by name.
void RegisterOverComposites(torch::Library& library) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const std::optional<c10::OperatorHandle> op = dispatcher.findSchema(name);
    if (!op.has_value() || op->schema().getNamespace() != "aten") continue;
    if (op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) continue;
    const bool structured =
        op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
    const bool composite = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                           op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    const bool on_cpu = op->hasKernelForDispatchKey(DispatchKey::CPU);
    const std::string full_name = c10::toString(name);
    if (structured && !IsMutable(*op)) {
      library.impl(full_name.c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&emu::RunLabelled>());
    } else if ((structured || composite) && on_cpu) {
      library.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&emu::RunOnHost>());
    }
  }
}

void RegisterKernels() {
  torch::Library& library = NewLibrary("aten", DispatchKey::PrivateUse1);
  emu::RegisterMemoryOps(library);
  emu::RegisterNnOps(library, NewLibrary("aten", DispatchKey::AutogradPrivateUse1));
  RegisterByName(library);
  RegisterOverComposites(library);
  // _copy_from takes lazily conjugated or negated tensors; resolving them would call it again.
  for (const DispatchKey key : {DispatchKey::Conjugate, DispatchKey::Negative}) {
    NewLibrary("aten", key).impl("_copy_from", torch::CppFunction::makeFallthrough());
  }
  NewLibrary("_", DispatchKey::PrivateUse1)
      .fallback(torch::CppFunction::makeFromBoxedFunction<&emu::RunOnHost>());
  // Autograd asks this of nested tensors made from the CPU's, where an error would end the process.
  NewLibrary("aten", DispatchKey::NestedTensorPrivateUse1)
      .impl("_nested_tensor_size", &at::native::_nested_tensor_size);
  emu::RegisterAutocast(NewLibrary("aten", DispatchKey::AutocastPrivateUse1));
  NewLibrary("_", DispatchKey::AutocastPrivateUse1).fallback(torch::CppFunction::makeFallthrough());
}

void RegisterDeviceType() {
  c10::register_privateuse1_backend("emu");
  c10::SetAllocator(emu::kEmu, &emu::EmuAllocator::Get());
  c10::impl::registerDeviceGuard(emu::kEmu, new emu::EmuGuard);
  at::RegisterPrivateUse1HooksInterface(new emu::EmuHooks);
  at::setHostAllocator(emu::kEmu, &emu::EmuPinnedAllocator::Get());
  RegisterKernels();
}

// Returns whether a device has a sticky error. IsCapturing has no side effect on a working machine.
// The broken machine's memory is leaked on purpose, since it cannot be freed.
bool Broken(EmulatedMachine& machine) {
  for (int index = 0; index < machine.device_count(); ++index) {
    const StreamHandle stream = machine.default_stream(index);
    if (!machine.device(index)->IsCapturing(stream).ok()) return true;
  }
  return false;
}

// Gives autograd a worker thread for each device. Autograd itself starts its workers when the first
// backward of the process runs, on any device, and no more for devices that appear later.
class BackwardWorkers : public torch::autograd::Engine {
 public:
  // Must not be called while a backward runs.
  static void Start(size_t device_count) {
    Engine& engine = get_base_engine();
    if (engine.*(&BackwardWorkers::thread_pool_shared_) == nullptr) return;  // no backward has run
    auto& queues = engine.*(&BackwardWorkers::device_ready_queues_);
    while (queues.size() < device_count) {
      const int device = static_cast<int>(queues.size());
      const auto queue = std::make_shared<torch::autograd::ReadyQueue>();
      queues.push_back(queue);
      // Count the thread before it starts: the engine's destructor waits for counted threads, and
      // the process may exit at any time.
      (engine.*(&BackwardWorkers::increment_non_reentrant_thread_count))();
      std::thread([&engine, device, queue] {
        engine.thread_init(device, queue, /*should_increment=*/false);
        (engine.*(&BackwardWorkers::decrement_non_reentrant_thread_count))();
      }).detach();
    }
  }
};

}  // namespace

absl::Status RegisterEmuDevice(std::shared_ptr<EmulatedMachine> machine) {
  if (machine == nullptr) {
    return absl::InvalidArgumentError(
        "RegisterEmuDevice: machine is null; it needs a machine that EmulatedMachine::Create "
        "returned");
  }
  if (const int64_t live_bytes = emu::EmuAllocator::Get().live_bytes(); live_bytes > 0) {
    if (!Broken(*emu::InstalledMachine())) {
      return absl::FailedPreconditionError(
          absl::StrCat("tensors of the machine that is registered hold ", live_bytes,
                       " bytes; drop them before another machine takes its place"));
    }
    PINION_LOG(kWarning) << "a device of the machine that is registered is broken; " << live_bytes
                         << " bytes that its tensors hold are lost, and the machine with them";
    emu::EmuAllocator::Get().Abandon();
  }
  // The registrations below require an installed machine.
  emu::InstallMachine(std::move(machine));
  static std::once_flag registered;
  std::call_once(registered, RegisterDeviceType);
  BackwardWorkers::Start(static_cast<size_t>(emu::DeviceCount()));
  return absl::OkStatus();
}

std::shared_ptr<EmulatedMachine> RegisteredEmuMachine() { return emu::InstalledMachine(); }

}  // namespace pinion
