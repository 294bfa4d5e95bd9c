// How much device memory LibTorch's allocators have given out, told at every change: the peaks that
// operators reach in between are seen by nobody who only asks now and then.
//
//   class Peaks : public MemoryObserver { ... };
//   MemoryScope scope(peaks);              // what runs on this thread
//   ObserveBackwards(peaks);               // and in backwards, whoever runs them
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

#include <ATen/core/Tensor.h>
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
  // A backward that is observed is about to add to the leaf's gradient, or to make it. On the
  // backward's thread, without a lock. Must not throw.
  virtual void OnAccumulate(const at::Tensor& leaf) {}
};

class [[nodiscard]] MemoryScope {
 public:
  // Null observes nothing.
  [[nodiscard]] explicit MemoryScope(std::shared_ptr<MemoryObserver> observer);
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

 private:
  std::shared_ptr<class MemoryReporter> reporter_;  // null: it observes nothing
};

// Observes every node of every backward from now on, as long as `observer` lives or until
// IgnoreBackwards: whoever calls backward, on whatever threads it runs, of Python's engine as well.
void ObserveBackwards(const std::shared_ptr<MemoryObserver>& observer);
void IgnoreBackwards(const MemoryObserver& observer);
bool ObservesBackwards(const MemoryObserver& observer);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_MEMORY_OBSERVER_H_
