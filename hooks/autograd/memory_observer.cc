#include "pinion/hooks/autograd/memory_observer.h"

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <atomic>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion {
namespace {

namespace profiler = torch::profiler::impl;

constexpr c10::DebugInfoKind kSlot = c10::DebugInfoKind::PROFILER_STATE;

// A profiler that is switched off, to everybody who asks.
class Reporter final : public profiler::ProfilerStateBase {
 public:
  explicit Reporter(std::shared_ptr<MemoryObserver> observer)
      : ProfilerStateBase(profiler::ProfilerConfig(profiler::ProfilerState::Disabled)),
        observer_(std::move(observer)) {}

  void reportMemoryUsage(void* data, int64_t size_bytes, size_t allocated_bytes,
                         size_t /*reserved_bytes*/, c10::Device device) override {
    observer_->OnDeviceBytes(device, static_cast<int64_t>(allocated_bytes),
                             size_bytes < 0 ? data : nullptr);
  }
  bool memoryProfilingEnabled() const override { return true; }
  profiler::ActiveProfilerType profilerType() override {
    return profiler::ActiveProfilerType::NONE;
  }

 private:
  const std::shared_ptr<MemoryObserver> observer_;
};

struct Backwards {
  Mutex mu;
  std::weak_ptr<MemoryObserver> observer ABSL_GUARDED_BY(mu);
  // Most backwards are observed by nobody, and take no lock.
  std::atomic<bool> has_observer{false};
};

Backwards& OfBackwards() {
  static auto* const backwards = new Backwards;
  return *backwards;
}

}  // namespace

MemoryScope::MemoryScope(std::shared_ptr<MemoryObserver> observer) {
  if (observer == nullptr || c10::ThreadLocalDebugInfo::get(kSlot) != nullptr) return;
  c10::ThreadLocalDebugInfo::_push(kSlot, std::make_shared<Reporter>(std::move(observer)));
  is_ours_ = true;
}

MemoryScope::~MemoryScope() {
  if (!is_ours_) return;
  try {
    c10::ThreadLocalDebugInfo::_pop(kSlot);
  } catch (const c10::Error&) {
    // Somebody has left something inside the scope; ours goes with the thread.
  }
}

void ObserveBackwards(std::weak_ptr<MemoryObserver> observer) {
  Backwards& backwards = OfBackwards();
  MutexLock lock(backwards.mu);
  backwards.has_observer = !observer.expired();
  backwards.observer = std::move(observer);
}

std::shared_ptr<MemoryObserver> ObserverOfBackwards() {
  Backwards& backwards = OfBackwards();
  if (!backwards.has_observer) return nullptr;
  MutexLock lock(backwards.mu);
  return backwards.observer.lock();
}

}  // namespace pinion
