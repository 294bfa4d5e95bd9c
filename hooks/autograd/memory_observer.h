// Reports every allocation and free of device memory by LibTorch's allocators, so that a memory
// peak inside an operator is seen.
//
//   class Peaks : public MemoryObserver { ... };
//   MemoryScope scope(peaks);              // work of this thread
//   ObserveBackwards(peaks);               // backwards, on any thread
//
// An observer takes the place of LibTorch's profiler (c10::reportMemoryUsageToProfiler):
//   - A scope inside a running profiler observes nothing.
//   - Starting a profiler inside a scope throws. A Kineto that was prepared before that throw can
//     start no other profiler in the process.
// Nested scopes all observe.
//
// Thread safety: thread-safe. A scope belongs to the thread that made it. A scope that ends out of
// order, or on another thread, stops observing.

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
  // Reports the bytes allocated on `device`. `freed` is the address of a freed block, null after an
  // allocation. Called on any thread inside the allocator, which may hold its lock: must not call
  // the allocator or a device, and must not throw.
  virtual void OnDeviceBytes(c10::Device device, int64_t allocated_bytes, const void* freed) = 0;
  // Reports that an observed backward is about to create the leaf's gradient or to add to it.
  // Called on the backward's thread, without a lock. Must not throw.
  virtual void OnAccumulate(const at::Tensor& leaf) {}
};

class [[nodiscard]] MemoryScope {
 public:
  // Observes nothing if `observer` is null.
  [[nodiscard]] explicit MemoryScope(std::shared_ptr<MemoryObserver> observer);
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

 private:
  std::shared_ptr<class MemoryReporter> reporter_;  // null if the scope observes nothing
};

// Observes every node of every backward, on any thread and of Python's engine as well, until
// IgnoreBackwards or until `observer` is destroyed.
void ObserveBackwards(const std::shared_ptr<MemoryObserver>& observer);
void IgnoreBackwards(const MemoryObserver& observer);
bool ObservesBackwards(const MemoryObserver& observer);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_MEMORY_OBSERVER_H_
