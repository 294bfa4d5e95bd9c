// A reference to device memory that a framework's allocator owns: the tier holds it, copies from
// and to it, and lets go of it, without knowing the framework.
//
//   DeviceMemory memory = TorchMemory(storage);   // in hooks: a c10::Storage
//   batch.Add(host, 0, memory.data(), memory.size_bytes());
//
// Giving the last reference back lets the framework hand the memory out again, in the order of the
// stream that it belongs to. Whoever gives it back must have made that stream wait for copies that
// still touch the memory: GuardedMemory (guarded_memory.h) does.
//
// Thread safety: a value; references to the same memory may be used on different threads.

#ifndef PINION_ENGINE_TIER_DEVICE_MEMORY_H_
#define PINION_ENGINE_TIER_DEVICE_MEMORY_H_

#include <cstdint>
#include <utility>

namespace pinion {

class DeviceMemory {
 public:
  // What a framework can do with its memory, which it knows as an `owner`. Must live for ever.
  class Framework {
   public:
    virtual void* data(void* owner) const = 0;
    virtual uint64_t size_bytes(void* owner) const = 0;
    virtual bool IsShared(void* owner) const = 0;
    virtual void Share(void* owner) const = 0;  // one more reference
    virtual void Release(void* owner) const = 0;

   protected:
    ~Framework() = default;
  };

  DeviceMemory() = default;  // empty
  // Takes over one reference to what `owner` stands for, which is not null.
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
  // Null if empty. The same for all references to the same memory.
  void* owner() const { return owner_; }

  // Not empty.
  void* data() const { return framework_->data(owner_); }
  uint64_t size_bytes() const { return framework_->size_bytes(owner_); }
  // Whether somebody else has a reference, too: to let go of this one frees nothing then.
  bool IsShared() const { return framework_->IsShared(owner_); }
  DeviceMemory Share() const {
    framework_->Share(owner_);
    return DeviceMemory(owner_, *framework_);
  }

  // Forgets the reference without giving it back: the memory is never handed out again.
  void Leak() { owner_ = nullptr; }

 private:
  void* owner_ = nullptr;
  const Framework* framework_ = nullptr;
};

}  // namespace pinion

#endif  // PINION_ENGINE_TIER_DEVICE_MEMORY_H_
