// Runs one kernel of the emulated device on the host, without copies, over the device's memory.
//
//   HostKernel kernel("aten::mm");
//   at::Tensor a = kernel.Read(device_a), b = kernel.Read(device_b);   // CPU tensors, same memory
//   kernel.Prepare();                                // earlier work has written their bytes
//   {
//     const HostScope scope;                         // plain CPU kernels: no autograd, no autocast
//     host = at::mm(a, b);
//   }
//   at::Tensor result = kernel.Result(host);         // fresh memory of the device
//   kernel.Launch();                                 // race checks, virtual time, trace
//
// The kernel runs on the current stream of its tensors' device; all tensors must be on one device.
//
// Thread safety: none; use a kernel on one thread.

#ifndef PINION_HOOKS_EMULATED_EMU_HOST_KERNEL_H_
#define PINION_HOOKS_EMULATED_EMU_HOST_KERNEL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <string>

#include "pinion/device/device.h"

namespace pinion::emu {

// Makes operators on CPU tensors run the CPU's kernels only, for the scope's lifetime.
class [[nodiscard]] HostScope {
 public:
  [[nodiscard]] HostScope();

 private:
  c10::impl::ExcludeDispatchKeyGuard excluded_;
};

// Returns a device tensor with exactly these strides, allocated on the current stream.
at::Tensor MakeDeviceTensor(c10::DeviceIndex index, at::IntArrayRef sizes, at::IntArrayRef strides,
                            at::ScalarType type);

// Returns the bytes of the tensor's elements; repeated elements (stride 0) count once.
double TrafficBytes(const at::Tensor& tensor);

class HostKernel {
 public:
  enum class Access { kRead, kWrite, kReadWrite };

  // `name` must outlive the kernel.
  explicit HostKernel(const std::string& name) : name_(name) {}
  HostKernel(const HostKernel&) = delete;
  HostKernel& operator=(const HostKernel&) = delete;

  // Returns the CPU tensor over the same memory. The same tensor gives the same alias, and shared
  // storages stay shared. Throws if the tensor is on another device than earlier ones.
  at::Tensor Alias(const at::Tensor& tensor, Access access);
  at::Tensor Read(const at::Tensor& tensor) { return Alias(tensor, Access::kRead); }

  // Sets the device of an operator without tensors.
  void SetDevice(c10::DeviceIndex index);
  c10::DeviceIndex device() const { return device_; }

  // Throws on an injected fault or a stuck stream; then do not run the operator.
  void Prepare();

  // Returns the device tensor for a CPU result: the original of an alias, or else a copy in fresh
  // memory with the same strides.
  at::Tensor Result(const at::Tensor& host);

  // Copies new shapes of written CPU tensors (out= arguments) to the device's tensors.
  void UpdateWritten();

  // Returns the bytes counted until the call: aliases that are read or written, and results.
  double memory_bytes() const;

  void Launch() { Launch(/*flops=*/0, memory_bytes()); }
  void Launch(double flops, double memory_bytes);
  // Blocks until the device is done, for operators whose result the host reads.
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
