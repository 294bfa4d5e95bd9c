#include "pinion/hooks/tier/torch_memory.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>

namespace pinion {
namespace {

class TorchFramework final : public DeviceMemory::Framework {
 public:
  // Not mutable_data(): only copies write the bytes, and LibTorch's copy-on-write must not react.
  void* data(void* owner) const override { return const_cast<void*>(Impl(owner)->data()); }
  uint64_t size_bytes(void* owner) const override { return Impl(owner)->nbytes(); }
  bool IsShared(void* owner) const override {
    return c10::raw::intrusive_ptr::use_count(Impl(owner)) > 1;
  }
  void Share(void* owner) const override { c10::raw::intrusive_ptr::incref(Impl(owner)); }
  void Release(void* owner) const override { c10::raw::intrusive_ptr::decref(Impl(owner)); }

 private:
  static c10::StorageImpl* Impl(void* owner) { return static_cast<c10::StorageImpl*>(owner); }
};

constexpr TorchFramework kTorch;

}  // namespace

DeviceMemory TorchMemory(c10::Storage storage) {
  return DeviceMemory(storage.unsafeReleaseStorageImpl(), kTorch);
}

c10::Storage StorageOf(const DeviceMemory& memory) {
  auto* const impl = static_cast<c10::StorageImpl*>(memory.owner());
  return c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl));
}

}  // namespace pinion
