// How much device memory LibTorch's allocators have given out, told at every change: the peaks that
// operators reach in between are seen by nobody who only asks now and then.
//
//   class Peaks : public MemoryObserver { ... };
//   MemoryScope scope(peaks);              // what runs on this thread
//   ObserveBackwards(peaks);               // and in backwards, on whatever threads they run
//
// An allocator reports to whoever is in the profiler's place (c10::reportMemoryUsageToProfiler):
// where a profiler has been started before, nothing is observed, and while somebody is observing no
// profiler can be started inside: LibTorch throws, and a Kineto that was prepared by then starts no
// other in this process. Scopes inside of each other all observe.
//
// Thread safety: thread-safe; a scope belongs to the thread that made it. One that ends out of
// order, or on another thread, observes nothing from then on.

#ifndef PINION_HOOKS_AUTOGRAD_MEMORY_OBSERVER_H_
#define PINION_HOOKS_AUTOGRAD_MEMORY_OBSERVER_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace pinion {

class MemoryObserver {
 public:
  virtual ~MemoryObserver() = default;
  // `freed` is the memory that was given back; null where memory was given out. Called inside of
  // the allocator, which may hold its lock: no call of it, nor of a device. On any thread. Must not
  // throw.
  virtual void OnDeviceBytes(c10::Device device, int64_t allocated_bytes, const void* freed) = 0;
};

class [[nodiscard]] MemoryScope {
 public:
  // Null observes nothing.
  [[nodiscard]] explicit MemoryScope(std::shared_ptr<MemoryObserver> observer);
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

 private:
  class Reporter;
  std::shared_ptr<Reporter> reporter_;  // null: it observes nothing
};

// From now on backwards that begin are observed by `observer`, as long as it lives; null: by
// nobody. The last call counts.
void ObserveBackwards(std::weak_ptr<MemoryObserver> observer);

// Whoever ObserveBackwards was called for; null: nobody.
std::shared_ptr<MemoryObserver> ObserverOfBackwards();

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_MEMORY_OBSERVER_H_
