#include "pinion/hooks/emulated/emu_copy.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <string>

#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/emulated/emu_host_kernel.h"
#include "pinion/hooks/emulated/emu_state.h"

namespace pinion::emu {
namespace {

void* DataOf(const at::Tensor& tensor) { return tensor.mutable_data_ptr(); }

bool HasMathBit(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

// Returns whether both tensors store the same sequence of elements. Contiguous tensors may differ
// in the strides of dimensions of size 1; packing them copies nothing.
bool SameBytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && !HasMathBit(a) && !HasMathBit(b) &&
         a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

void CopyWithinDevice(const at::Tensor& src, const at::Tensor& dst) {
  static const std::string* const name = new std::string("aten::copy_");
  HostKernel kernel(*name);
  const at::Tensor from = kernel.Read(src);
  const at::Tensor to = kernel.Alias(dst, HostKernel::Access::kWrite);
  kernel.Prepare();
  {
    const HostScope scope;
    to.copy_(from);
  }
  kernel.Launch();
}

void CopyBytes(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  const bool to_host = dst.is_cpu();
  const c10::DeviceIndex index = (to_host ? src : dst).device().index();
  ThrowIfError(
      Machine().Copy(index, DataOf(dst), src.const_data_ptr(), src.nbytes(), CurrentHandle(index)),
      "copying between host and device");
  if (!non_blocking) {
    ThrowIfError(DeviceAt(index).SynchronizeStream(CurrentHandle(index)), "waiting for a copy");
    return;
  }
  // Pinned memory must not be reused before the copy completes. record_event ignores other memory.
  const c10::DataPtr& host = (to_host ? dst : src).storage().data_ptr();
  at::getHostAllocator(kEmu)->record_event(host.get(), host.get_context(), CurrentStream(index));
}

void CopyBetweenDevices(const at::Tensor& src, const at::Tensor& dst) {
  const c10::Stream source = CurrentStream(src.device().index());
  const c10::Stream destination = CurrentStream(dst.device().index());
  // `dst` is written on the source's stream, so that stream follows the destination's and is
  // followed by it.
  c10::Event dst_ready(kEmu);
  dst_ready.record(destination);
  dst_ready.block(source);
  ThrowIfError(Machine().Copy(source.device_index(), DataOf(dst), src.const_data_ptr(),
                              src.nbytes(), HandleOf(source)),
               "copying between devices");
  c10::Event copied(kEmu);
  copied.record(source);
  copied.block(destination);
}

void MoveBytes(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  if (src.is_cpu() || dst.is_cpu()) {
    CopyBytes(src, dst, non_blocking);
  } else {
    CopyBetweenDevices(src, dst);
  }
}

}  // namespace

at::Tensor CopyFrom(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  const at::Tensor from = src.expand(dst.sizes());  // throws where the shapes do not fit
  if (dst.numel() == 0) return dst;
  if (from.device() == dst.device()) {
    CopyWithinDevice(from, dst);
  } else if (SameBytes(from, dst)) {
    MoveBytes(from, dst, non_blocking);
  } else {
    const at::Tensor packed = from.to(dst.scalar_type()).resolve_conj().resolve_neg().contiguous();
    if (dst.is_contiguous() && !HasMathBit(dst)) {
      MoveBytes(packed, dst, non_blocking);
    } else {
      const at::Tensor staged = at::empty(dst.sizes(), dst.options());
      MoveBytes(packed, staged, /*non_blocking=*/false);
      dst.copy_(staged);
    }
  }
  return dst;
}

}  // namespace pinion::emu
