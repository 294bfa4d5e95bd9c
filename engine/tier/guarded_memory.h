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

#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "pinion/device/device.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/tier/device_memory.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion {

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
