#include "pinion/hooks/autograd/memory_observer.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

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

// Adds the observers that the thread does not have yet. False: there is nothing to take off again.
bool Push(Observers added) {
  Observers observers;
  if (const c10::DebugInfoBase* const profiler = c10::ThreadLocalDebugInfo::get(kSlot)) {
    const auto* const outer = dynamic_cast<const Reporter*>(profiler);
    if (outer == nullptr) return false;
    observers = outer->observers();
  }
  const size_t before = observers.size();
  for (std::shared_ptr<MemoryObserver>& one : added) {
    if (std::find(observers.begin(), observers.end(), one) != observers.end()) continue;
    observers.push_back(std::move(one));
  }
  if (observers.size() == before) return false;
  c10::ThreadLocalDebugInfo::_push(kSlot, std::make_shared<Reporter>(std::move(observers)));
  return true;
}

// A callback at the begin of each node, which is only there while somebody observes: engines that
// Python or a program calls directly pass no code of ours before their worker threads run.
class Backwards {
 public:
  void Observe(const std::shared_ptr<MemoryObserver>& observer) {
    MutexLock lock(mu_);
    Forget(observer.get());
    observers_.emplace_back(observer.get(), observer);
    if (!callback_.has_value()) {
      callback_ = at::addGlobalCallback(
          at::RecordFunctionCallback(&OnNode).scopes({at::RecordScope::BACKWARD_FUNCTION}));
    }
  }
  void Ignore(const MemoryObserver& observer) {
    MutexLock lock(mu_);
    Forget(&observer);
    if (observers_.empty() && callback_.has_value()) {
      at::removeCallback(*std::exchange(callback_, std::nullopt));
    }
  }
  Observers Living() {
    Observers living;
    MutexLock lock(mu_);
    for (const auto& [address, one] : observers_) {
      if (std::shared_ptr<MemoryObserver> observer = one.lock()) {
        living.push_back(std::move(observer));
      }
    }
    return living;
  }

 private:
  static std::unique_ptr<at::ObserverContext> OnNode(const at::RecordFunction&);

  // And those that live no more. By address: the last owner of one must not go under the lock.
  void Forget(const MemoryObserver* observer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::erase_if(observers_, [observer](const auto& one) {
      return one.first == observer || one.second.expired();
    });
  }

  Mutex mu_;
  std::vector<std::pair<const MemoryObserver*, std::weak_ptr<MemoryObserver>>> observers_
      ABSL_GUARDED_BY(mu_);
  std::optional<at::CallbackHandle> callback_ ABSL_GUARDED_BY(mu_);
};

Backwards& OfBackwards() {
  static auto* const backwards = new Backwards;
  return *backwards;
}

std::unique_ptr<at::ObserverContext> Backwards::OnNode(const at::RecordFunction&) {
  // The engine puts the thread's state back behind each node, and with it takes this off. A node
  // that a program calls by itself has nobody who would.
  if (CurrentBackward() != -1) Push(OfBackwards().Living());
  return nullptr;
}

}  // namespace

MemoryScope::MemoryScope(std::shared_ptr<MemoryObserver> observer) {
  if (observer != nullptr) is_ours_ = Push({std::move(observer)});
}

MemoryScope::~MemoryScope() {
  if (!is_ours_) return;
  try {
    c10::ThreadLocalDebugInfo::_pop(kSlot);
  } catch (const c10::Error&) {
    // Somebody has left something inside the scope; ours goes with the thread.
  }
}

void ObserveBackwards(const std::shared_ptr<MemoryObserver>& observer) {
  OfBackwards().Observe(observer);
}

void IgnoreBackwards(const MemoryObserver& observer) { OfBackwards().Ignore(observer); }

bool ObservesBackwards(const MemoryObserver& observer) {
  const Observers living = OfBackwards().Living();
  return std::any_of(living.begin(), living.end(),
                     [&observer](const auto& one) { return one.get() == &observer; });
}

}  // namespace pinion
