#include "pinion/hooks/autograd/memory_observer.h"

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion {
namespace {

namespace profiler = torch::profiler::impl;

constexpr c10::DebugInfoKind kSlot = c10::DebugInfoKind::PROFILER_STATE;

using Observers = std::vector<std::shared_ptr<MemoryObserver>>;

// A profiler that is switched off, to everybody who asks.
class Reporter final : public profiler::ProfilerStateBase {
 public:
  explicit Reporter(Observers observers)
      : ProfilerStateBase(profiler::ProfilerConfig(profiler::ProfilerState::Disabled)),
        observers_(std::move(observers)) {}

  const Observers& observers() const { return observers_; }

  void reportMemoryUsage(void* data, int64_t size_bytes, size_t allocated_bytes,
                         size_t /*reserved_bytes*/, c10::Device device) override {
    for (const std::shared_ptr<MemoryObserver>& observer : observers_) {
      observer->OnDeviceBytes(device, static_cast<int64_t>(allocated_bytes),
                              size_bytes < 0 ? data : nullptr);
    }
  }
  bool memoryProfilingEnabled() const override { return true; }
  profiler::ActiveProfilerType profilerType() override {
    return profiler::ActiveProfilerType::NONE;
  }

 private:
  const Observers observers_;
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
  if (observer == nullptr) return;
  Observers observers;
  if (const c10::DebugInfoBase* const profiler = c10::ThreadLocalDebugInfo::get(kSlot)) {
    const auto* const outer = dynamic_cast<const Reporter*>(profiler);
    if (outer == nullptr) return;
    observers = outer->observers();
    if (std::find(observers.begin(), observers.end(), observer) != observers.end()) return;
  }
  observers.push_back(std::move(observer));
  c10::ThreadLocalDebugInfo::_push(kSlot, std::make_shared<Reporter>(std::move(observers)));
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
