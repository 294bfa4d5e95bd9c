#include "pinion/hooks/autograd/memory_observer.h"

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <atomic>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion {
namespace {

namespace profiler = torch::profiler::impl;

constexpr c10::DebugInfoKind kSlot = c10::DebugInfoKind::PROFILER_STATE;

}  // namespace

// A profiler that is switched off, to everybody who asks.
class MemoryScope::Reporter final : public profiler::ProfilerStateBase,
                                    public std::enable_shared_from_this<Reporter> {
 public:
  Reporter(std::shared_ptr<MemoryObserver> observer, std::shared_ptr<Reporter> outer)
      : ProfilerStateBase(profiler::ProfilerConfig(profiler::ProfilerState::Disabled)),
        observer_(std::move(observer)),
        outer_(std::move(outer)) {}

  // Of the calling thread, without those whose scopes have ended.
  static void DropEnded() {
    const auto has_ended = [](const c10::DebugInfoBase* info) {
      const auto* const reporter = dynamic_cast<const Reporter*>(info);
      return reporter != nullptr && reporter->has_ended_;
    };
    try {
      while (has_ended(c10::ThreadLocalDebugInfo::get(kSlot))) {
        c10::ThreadLocalDebugInfo::_pop(kSlot);
      }
    } catch (const c10::Error&) {
      // Somebody has left something inside the scope; ours goes with the thread, or a later scope.
    }
  }

  void End() { has_ended_ = true; }
  bool ReportsTo(const MemoryObserver& observer) const {
    return (observer_.get() == &observer && !has_ended_) ||
           (outer_ != nullptr && outer_->ReportsTo(observer));
  }

  void reportMemoryUsage(void* data, int64_t size_bytes, size_t allocated_bytes,
                         size_t reserved_bytes, c10::Device device) override {
    if (outer_ != nullptr) {
      outer_->reportMemoryUsage(data, size_bytes, allocated_bytes, reserved_bytes, device);
    }
    if (has_ended_) return;
    observer_->OnDeviceBytes(device, static_cast<int64_t>(allocated_bytes),
                             size_bytes < 0 ? data : nullptr);
  }
  bool memoryProfilingEnabled() const override { return true; }
  profiler::ActiveProfilerType profilerType() override {
    return profiler::ActiveProfilerType::NONE;
  }

 private:
  const std::shared_ptr<MemoryObserver> observer_;
  const std::shared_ptr<Reporter> outer_;  // null without one
  std::atomic<bool> has_ended_ = false;
};

namespace {

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
  Reporter::DropEnded();
  std::shared_ptr<Reporter> outer;
  if (c10::DebugInfoBase* const profiler = c10::ThreadLocalDebugInfo::get(kSlot)) {
    auto* const reporter = dynamic_cast<Reporter*>(profiler);
    if (reporter == nullptr || reporter->ReportsTo(*observer)) return;
    outer = reporter->shared_from_this();
  }
  reporter_ = std::make_shared<Reporter>(std::move(observer), std::move(outer));
  c10::ThreadLocalDebugInfo::_push(kSlot, reporter_);
}

MemoryScope::~MemoryScope() {
  if (reporter_ == nullptr) return;
  reporter_->End();
  Reporter::DropEnded();
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
