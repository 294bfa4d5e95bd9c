// A counted reference to device memory that a framework's allocator owns, without depending on the
// framework.
//
//   DeviceMemory memory = TorchMemory(storage);   // in hooks: a c10::Storage
//   batch.Add(host, 0, memory.data(), memory.size_bytes());
//
// After the last reference is released, the framework reuses the memory in the order of its stream.
// Before you release a reference, make that stream wait for copies that still touch the memory:
// GuardedMemory (guarded_memory.h) does so.
//
// Thread safety: a value; references to the same memory may be used on different threads.

#ifndef PINION_ENGINE_TIER_DEVICE_MEMORY_H_
#define PINION_ENGINE_TIER_DEVICE_MEMORY_H_

#include <cstdint>
#include <utility>

namespace pinion {

class DeviceMemory {
 public:
  // A framework's operations on its memory, which it identifies by `owner`. Must live for ever.
  class Framework {
   public:
    virtual void* data(void* owner) const = 0;
    virtual uint64_t size_bytes(void* owner) const = 0;
    virtual bool IsShared(void* owner) const = 0;
    virtual void Share(void* owner) const = 0;  // adds a reference
    virtual void Release(void* owner) const = 0;

   protected:
    ~Framework() = default;
  };

  DeviceMemory() = default;  // empty
  // Takes over one reference to the memory of `owner`, which is not null.
  DeviceMemory(void* owner, const Framework& framework) : owner_(owner), framework_(&framework) {}
  DeviceMemory(DeviceMemory&& other) noexcept
      : owner_(std::exchange(other.owner_, nullptr)), framework_(other.framework_) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    DeviceMemory taken(std::move(other));
    std::swap(owner_, taken.owner_);
    std::swap(framework_, taken.framework_);
    return *this;
  }
  ~DeviceMemory() {
    if (owner_ != nullptr) framework_->Release(owner_);
  }

  explicit operator bool() const { return owner_ != nullptr; }
  // Returns null if empty; equal for all references to the same memory.
  void* owner() const { return owner_; }

  // The next four require a non-empty reference.
  void* data() const { return framework_->data(owner_); }
  uint64_t size_bytes() const { return framework_->size_bytes(owner_); }
  // Returns true if other references exist: then releasing this one frees nothing.
  bool IsShared() const { return framework_->IsShared(owner_); }
  DeviceMemory Share() const {
    framework_->Share(owner_);
    return DeviceMemory(owner_, *framework_);
  }

  // Drops the reference without releasing it: the memory is never reused.
  void Leak() { owner_ = nullptr; }

 private:
  void* owner_ = nullptr;
  const Framework* framework_ = nullptr;
};

}  // namespace pinion

#endif  // PINION_ENGINE_TIER_DEVICE_MEMORY_H_
