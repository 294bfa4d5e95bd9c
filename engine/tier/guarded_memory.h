// Device memory that a copy may still touch, and the order in which it may go.
//
// Rule: all device memory under copy has one owner. On whatever thread that owner lets go, the
// stream that the memory belongs to waits for the copy first, so the framework cannot hand the
// memory out again while the copy still reads or writes it. If that wait cannot be enqueued the
// host waits; if it cannot either (a poisoned engine, an exiting process) the memory is leaked.
//
// Thread safety: a value; letting go of different ones on different threads is fine. Never destroy
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
  // `stream` is the one that the memory belongs to: its frees are ordered on it.
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

  // More memory under the same copy, which one wait covers. Not empty.
  void Add(DeviceMemory memory) {
    if (first_) {
      rest_.push_back(std::move(memory));
    } else {
      first_ = std::move(memory);
    }
  }
  // Memory under another copy of the same direction, of the same engine, with the same stream and
  // site: one wait for the later copy covers both.
  void Add(GuardedMemory&& other);

  explicit operator bool() const { return static_cast<bool>(first_); }
  // The first one; not of an empty object. Whoever uses the bytes on a stream has to make that
  // stream wait for the copy.
  const DeviceMemory& memory() const { return first_; }
  const Transfer& copy() const { return copy_; }
  StreamHandle stream() const { return stream_; }

  // Lets go without the wait: a stream that uses the memory has waited for the copy, and the
  // framework orders the free after that stream.
  void Disarm() {
    first_ = DeviceMemory();
    rest_.clear();
  }

 private:
  void Drop();  // not of an empty object

  // Most guard one: it is moved by some words.
  DeviceMemory first_;
  std::vector<DeviceMemory> rest_;
  StreamHandle stream_;
  Transfer copy_;
  const WaitSite* site_ = &kFreeAfterCopy;
};

using GuardedMemories = absl::InlinedVector<GuardedMemory, 1>;

// Adds `memory`, unless it is empty, to the last one of `all` if they have one stream, so that one
// wait covers both; else behind it.
void AddByStream(GuardedMemory&& memory, GuardedMemories& all);

}  // namespace pinion

#endif  // PINION_ENGINE_TIER_GUARDED_MEMORY_H_
