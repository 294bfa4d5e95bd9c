#include "pinion/hooks/autograd/memory_observer.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/device/allocation_bytes.h"
#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {
namespace {

namespace profiler = torch::profiler::impl;

c10::DebugInfoKind Slot() { return c10::DebugInfoKind::PROFILER_STATE; }

}  // namespace

// Reports itself to LibTorch as a profiler that is switched off.
class MemoryReporter final : public profiler::ProfilerStateBase,
                             public std::enable_shared_from_this<MemoryReporter> {
 public:
  MemoryReporter(std::shared_ptr<MemoryObserver> observer, std::shared_ptr<MemoryReporter> outer)
      : ProfilerStateBase(profiler::ProfilerConfig(profiler::ProfilerState::Disabled)),
        outer_(std::move(outer)),
        observer_(std::move(observer)) {}

  // Removes reporters of ended scopes from the calling thread.
  static void DropEnded() {
    const auto has_ended = [](const c10::DebugInfoBase* info) {
      const auto* const reporter = dynamic_cast<const MemoryReporter*>(info);
      return reporter != nullptr && reporter->HasEnded();
    };
    try {
      while (has_ended(c10::ThreadLocalDebugInfo::get(Slot()))) {
        c10::ThreadLocalDebugInfo::_pop(Slot());
      }
    } catch (const c10::Error&) {
      // Other debug info lies above the reporter; a later scope or the thread's end removes it.
    }
  }

  // Adds a reporter. Returns null if a profiler runs or the observer already has a reporter.
  static std::shared_ptr<MemoryReporter> Push(std::shared_ptr<MemoryObserver> observer) {
    DropEnded();
    std::shared_ptr<MemoryReporter> outer;
    if (c10::DebugInfoBase* const profiler = c10::ThreadLocalDebugInfo::get(Slot())) {
      auto* const reporter = dynamic_cast<MemoryReporter*>(profiler);
      if (reporter == nullptr || reporter->ReportsTo(*observer)) return nullptr;
      outer = reporter->shared_from_this();
    }
    auto pushed = std::make_shared<MemoryReporter>(std::move(observer), std::move(outer));
    c10::ThreadLocalDebugInfo::_push(Slot(), pushed);
    return pushed;
  }

  // Also drops the observer: LibTorch's workers may still own the reporter for a while.
  void End() {
    std::shared_ptr<MemoryObserver> observer;  // destroyed after the lock
    MutexLock lock(mu_);
    observer.swap(observer_);
  }
  bool HasEnded() const {
    MutexLock lock(mu_);
    return observer_ == nullptr;
  }
  bool ReportsTo(const MemoryObserver& observer) const {
    {
      MutexLock lock(mu_);
      if (observer_.get() == &observer) return true;
    }
    return outer_ != nullptr && outer_->ReportsTo(observer);
  }

  void reportMemoryUsage(void* data, int64_t size_bytes, size_t allocated_bytes,
                         size_t reserved_bytes, c10::Device device) override {
    if (outer_ != nullptr) {
      outer_->reportMemoryUsage(data, size_bytes, allocated_bytes, reserved_bytes, device);
    }
    const bool is_free = size_bytes < 0;
    const int64_t added_bytes =
        is_free ? 0 : static_cast<int64_t>(AllocationBytes(static_cast<uint64_t>(size_bytes)));
    MutexLock lock(mu_);
    if (observer_ == nullptr) return;
    observer_->OnDeviceBytes(device, static_cast<int64_t>(allocated_bytes), added_bytes,
                             is_free ? data : nullptr);
  }
  void reportOutOfMemory(int64_t size_bytes, size_t allocated_bytes, size_t reserved_bytes,
                         c10::Device device) override {
    if (outer_ != nullptr) {
      outer_->reportOutOfMemory(size_bytes, allocated_bytes, reserved_bytes, device);
    }
    MutexLock lock(mu_);
    if (observer_ == nullptr) return;
    observer_->OnRefused(device, static_cast<int64_t>(allocated_bytes) + size_bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }
  profiler::ActiveProfilerType profilerType() override {
    return profiler::ActiveProfilerType::NONE;
  }

 private:
  const std::shared_ptr<MemoryReporter> outer_;  // null without one
  mutable Mutex mu_;
  std::shared_ptr<MemoryObserver> observer_ ABSL_GUARDED_BY(mu_);  // null once it has ended
};

namespace {

using Observers = std::vector<std::shared_ptr<MemoryObserver>>;

// Registers a callback for the begin of each node while there are observers. A callback also covers
// backwards that Python's engine or a program starts without calling our engine proxy.
class Backwards {
 public:
  void Observe(const std::shared_ptr<MemoryObserver>& observer) {
    MutexLock lock(mu_);
    Forget(observer.get());
    observers_.emplace_back(observer.get(), observer);
    if (!callback_.has_value()) {
      callback_ = at::addGlobalCallback(at::RecordFunctionCallback(&OnNode, &OnNodeEnd)
                                            .scopes({at::RecordScope::BACKWARD_FUNCTION}));
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
  // Aliases must be released before the engine releases the node's saved tensors: an aliased output
  // owns the node, which would then own itself.
  static void OnNodeEnd(const at::RecordFunction&, at::ObserverContext*) { SettleLoans(); }

  // Also removes destroyed observers. By address: the lock must not be held while one is destroyed.
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

thread_local std::optional<uint64_t> outermost_node;

// Lives as long as the thread evaluates its outermost node.
class OutermostNode final : public at::ObserverContext {
 public:
  OutermostNode() { outermost_node = CurrentBackwardNode(); }
  ~OutermostNode() override { outermost_node.reset(); }
};

Backwards& OfBackwards() {
  static auto* const backwards = new Backwards;
  return *backwards;
}

std::unique_ptr<at::ObserverContext> Backwards::OnNode(const at::RecordFunction&) {
  // The engine restores the thread's state after each node, which removes the reporter. Nothing
  // removes it after a node that a program calls itself.
  if (CurrentBackward() == -1) return nullptr;
  const auto node = torch::autograd::get_current_node();
  const auto* const accumulate = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
  for (const std::shared_ptr<MemoryObserver>& one : OfBackwards().Living()) {
    if (accumulate != nullptr) one->OnAccumulate(accumulate->variable);
    // The engine calls hooks before it tells of their node.
    if (MemoryReporter::Push(one) != nullptr) one->OnUnobserved();
  }
  return outermost_node.has_value() ? nullptr : std::make_unique<OutermostNode>();
}

}  // namespace

MemoryScope::MemoryScope(std::shared_ptr<MemoryObserver> observer) {
  if (observer != nullptr) reporter_ = MemoryReporter::Push(std::move(observer));
}

MemoryScope::~MemoryScope() {
  if (reporter_ == nullptr) return;
  reporter_->End();
  MemoryReporter::DropEnded();
}

BackwardScope::BackwardScope() {
  for (std::shared_ptr<MemoryObserver>& one : OfBackwards().Living()) {
    scopes_.emplace_back(std::move(one));
  }
}

void ObserveBackwards(const std::shared_ptr<MemoryObserver>& observer) {
  OfBackwards().Observe(observer);
}

void IgnoreBackwards(const MemoryObserver& observer) { OfBackwards().Ignore(observer); }

uint64_t OutermostBackwardNode() { return outermost_node.value_or(CurrentBackwardNode()); }

}  // namespace pinion
