// Owns device memory that a copy may still touch, and frees it only after the copy.
//
//   GuardedMemory guarded(std::move(memory), stream, copy, kFreeAfterCopy);
//   // The destructor makes `stream` wait for `copy`, then releases the memory.
//
// Rule: all device memory under copy has one owner. The owner's destructor, on any thread, first
// makes the memory's stream wait for the copy, so that the framework cannot reuse the memory too
// early. If this wait cannot be enqueued, the host waits. If the host cannot wait either (a
// poisoned engine, an exiting process), the memory is leaked.
//
// Thread safety: a value; different objects may be destroyed on different threads. Never destroy
// one with a lock held: it calls the device.

#ifndef PINION_ENGINE_TIER_GUARDED_MEMORY_H_
#define PINION_ENGINE_TIER_GUARDED_MEMORY_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "pinion/device/device.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion {

// A counted reference to device memory that a framework's allocator owns, without depending on the
// framework.
//
//   DeviceMemory memory = TorchMemory(storage);   // in hooks: a c10::Storage
//   batch.Add(host, 0, memory.data(), memory.size_bytes());
//
// After the last reference is released, the framework reuses the memory in the order of its stream.
// Before you release a reference, make that stream wait for copies that still touch the memory:
// GuardedMemory does so.
//
// Thread safety: a value; references to the same memory may be used on different threads.
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

// Device memory under copy is freed after the copy.
inline constexpr WaitSite kFreeAfterCopy("kFreeAfterCopy", kEngineWaits);

class GuardedMemory {
 public:
  GuardedMemory() = default;  // empty
  // `stream` is the stream that orders the frees of the memory.
  GuardedMemory(StreamHandle stream, Transfer copy, const WaitSite& site)
      : stream_(stream), copy_(std::move(copy)), site_(&site) {}
  GuardedMemory(DeviceMemory memory, StreamHandle stream, Transfer copy, const WaitSite& site)
      : GuardedMemory(stream, std::move(copy), site) {
    Add(std::move(memory));
  }
  GuardedMemory(GuardedMemory&& other) noexcept = default;
  GuardedMemory& operator=(GuardedMemory&& other) noexcept;
  ~GuardedMemory() {
    if (first_) Drop();
  }

  // Adds memory (not empty) under the same copy; one wait covers it.
  void Add(DeviceMemory memory) {
    if (first_) {
      rest_.push_back(std::move(memory));
    } else {
      first_ = std::move(memory);
    }
  }
  // Adds memory under another copy of the same engine, direction, stream and site: one wait for the
  // later copy covers both.
  void Add(GuardedMemory&& other);

  explicit operator bool() const { return static_cast<bool>(first_); }
  // Returns the first memory of a non-empty object. Streams must wait for the copy before using it.
  const DeviceMemory& memory() const { return first_; }
  const Transfer& copy() const { return copy_; }
  StreamHandle stream() const { return stream_; }

  // Releases the memory without a wait. Allowed if a stream that uses the memory has waited for the
  // copy, and the framework orders the free after that stream.
  void Disarm() {
    first_ = DeviceMemory();
    rest_.clear();
  }

 private:
  void Drop();  // requires a non-empty object

  // Separate from rest_, because most objects guard one memory.
  DeviceMemory first_;
  std::vector<DeviceMemory> rest_;
  StreamHandle stream_;
  Transfer copy_;
  const WaitSite* site_ = &kFreeAfterCopy;
};

using GuardedMemories = absl::InlinedVector<GuardedMemory, 1>;

// Appends `memory` to `all`, or does nothing if it is empty. Merges it into the last element if
// both have one stream, so that one wait covers both.
void AddByStream(GuardedMemory&& memory, GuardedMemories& all);

}  // namespace pinion

#endif  // PINION_ENGINE_TIER_GUARDED_MEMORY_H_
