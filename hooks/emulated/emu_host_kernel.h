// One kernel of the emulated device, run on the host over the device's memory without copies.
//
//   HostKernel kernel("aten::mm");
//   at::Tensor a = kernel.Read(device_a), b = kernel.Read(device_b);   // CPU tensors, same memory
//   kernel.Prepare();                                // their bytes are there now
//   {
//     const HostScope scope;                         // plain CPU kernels: no autograd, no autocast
//     host = at::mm(a, b);
//   }
//   at::Tensor result = kernel.Result(host);         // fresh memory of the device
//   kernel.Launch();                                 // race checks, virtual time, trace
//
// The kernel runs on the current stream of the device that its tensors are on, which must be one.
//
// Thread safety: none; a value of one thread.

#ifndef PINION_HOOKS_EMULATED_EMU_HOST_KERNEL_H_
#define PINION_HOOKS_EMULATED_EMU_HOST_KERNEL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>

#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"

namespace pinion::emu {

// Within one, operators on CPU tensors are kernels of the CPU and nothing else.
class [[nodiscard]] HostScope {
 public:
  [[nodiscard]] HostScope();

 private:
  c10::impl::ExcludeDispatchKeyGuard excluded_;
};

// A device tensor of exactly these strides, on the current stream.
at::Tensor MakeDeviceTensor(c10::DeviceIndex index, at::IntArrayRef sizes, at::IntArrayRef strides,
                            at::ScalarType type);

// Bytes of the tensor's elements, each counted once even where the tensor repeats them.
double TrafficBytes(const at::Tensor& tensor);

class HostKernel {
 public:
  enum class Access { kRead, kWrite, kReadWrite };

  // `name` must outlive the kernel.
  explicit HostKernel(const std::string& name) : name_(name) {}
  HostKernel(const HostKernel&) = delete;
  HostKernel& operator=(const HostKernel&) = delete;

  // The CPU tensor over the same memory: the same one whenever the same tensor is given, with a
  // shared storage wherever storages are shared. Throws if the tensor is on another device than
  // those before.
  at::Tensor Alias(const at::Tensor& tensor, Access access);
  at::Tensor Read(const at::Tensor& tensor) { return Alias(tensor, Access::kRead); }

  // For an operator without tensors.
  void SetDevice(c10::DeviceIndex index);
  c10::DeviceIndex device() const { return device_; }

  // Throws if the kernel cannot run (an injected fault, a stuck stream); the operator must not,
  // then.
  void Prepare();

  // The device's tensor for what the CPU returned: the original of an alias, else a copy in fresh
  // memory with the same strides.
  at::Tensor Result(const at::Tensor& host);

  // Carries what the CPU kernel did to the shapes of written tensors (out= arguments) over to the
  // device's tensors.
  void UpdateWritten();

  // As counted so far: aliases that are read or written, and results.
  double memory_bytes() const;

  void Launch() { Launch(/*flops=*/0, memory_bytes()); }
  void Launch(double flops, double memory_bytes);
  // Blocks the host until the device is done, as an operator does whose result the host reads.
  void Synchronize();

 private:
  struct SharedStorage {
    c10::StorageImpl* device;
    c10::Storage host;
    const void* data;
  };
  struct Aliased {
    at::Tensor device;
    at::Tensor host;
    Access access;
  };

  const c10::Storage& HostStorage(const at::Tensor& tensor);

  const std::string& name_;
  c10::DeviceIndex device_ = -1;
  StreamHandle stream_;
  c10::SmallVector<SharedStorage, 8> storages_;
  c10::SmallVector<Aliased, 8> aliased_;
  c10::SmallVector<at::Tensor, 4> results_;
};

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_HOST_KERNEL_H_
