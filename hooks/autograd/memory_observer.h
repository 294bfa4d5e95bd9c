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
#include <deque>
#include <memory>

namespace pinion {

class MemoryObserver {
 public:
  virtual ~MemoryObserver() = default;
  // Reports the bytes allocated on `device`. `added_bytes` is the size of a block that was just
  // allocated, 0 after a free. `freed` is the address of a freed block, null after an allocation.
  // Called on any thread inside the allocator, which may hold its lock: must not call the allocator
  // or a device, and must not throw.
  virtual void OnDeviceBytes(c10::Device device, int64_t allocated_bytes, int64_t added_bytes,
                             const void* freed) = 0;
  // Reports that the device refused memory, with which it would have had `wanted_bytes`. Called as
  // OnDeviceBytes.
  virtual void OnRefused(c10::Device device, int64_t wanted_bytes) {}
  // Reports that hooks on gradients may have allocated memory without a report: an observed
  // backward, begun by another engine than ours, is about to evaluate a node. Called on the
  // backward's thread, without a lock. Must not throw.
  virtual void OnUnobserved() {}
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
// IgnoreBackwards or until `observer` is destroyed. Hooks on gradients and before nodes are
// observed if a BackwardScope is open. See OnUnobserved for other backwards.
void ObserveBackwards(const std::shared_ptr<MemoryObserver>& observer);
void IgnoreBackwards(const MemoryObserver& observer);

// Returns autograd's sequence number of the node that the calling thread evaluates, 0 outside of
// one. Of a node that runs a backward of its own, which is observed, the outer one's.
uint64_t OutermostBackwardNode();

// Observes all of a backward that this thread runs in the scope, for each observer of backwards.
// LibTorch carries a scope to the threads of a backward.
class [[nodiscard]] BackwardScope {
 public:
  [[nodiscard]] BackwardScope();
  BackwardScope(const BackwardScope&) = delete;
  BackwardScope& operator=(const BackwardScope&) = delete;

 private:
  std::deque<MemoryScope> scopes_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_MEMORY_OBSERVER_H_
