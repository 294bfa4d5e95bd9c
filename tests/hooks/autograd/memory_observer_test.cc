// Checks that observers see LibTorch's device allocations in scopes and backward, no others.

#include "pinion/hooks/autograd/memory_observer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sin.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/tests/hooks/support/cpu_profiler.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

constexpr int64_t kTensorBytes = 64 * kKiB;

// The observations of one device.
class Peaks : public MemoryObserver {
 public:
  struct Told {
    int64_t calls = 0;
    int64_t peak_bytes = 0;
    int64_t last_bytes = 0;
    int64_t added_bytes = 0;
    int64_t unobserved = 0;
    int64_t wanted_bytes = 0;
    std::set<std::thread::id> threads;
    std::vector<const c10::TensorImpl*> leaves;
  };

  explicit Peaks(c10::Device device) : device_(device) {}

  void OnDeviceBytes(c10::Device device, int64_t allocated_bytes, int64_t added_bytes,
                     const void* freed) override {
    if (device != device_) return;
    MutexLock lock(mu_);
    ++told_.calls;
    told_.peak_bytes = std::max(told_.peak_bytes, allocated_bytes);
    told_.last_bytes = allocated_bytes;
    told_.added_bytes += added_bytes;
    told_.threads.insert(std::this_thread::get_id());
  }
  void OnRefused(c10::Device device, int64_t wanted_bytes) override {
    if (device != device_) return;
    MutexLock lock(mu_);
    told_.wanted_bytes = wanted_bytes;
  }
  void OnUnobserved() override {
    MutexLock lock(mu_);
    ++told_.unobserved;
  }
  void OnAccumulate(const at::Tensor& leaf) override {
    MutexLock lock(mu_);
    told_.leaves.push_back(leaf.unsafeGetTensorImpl());
  }
  // Returns the observations since the last call.
  Told Take() {
    MutexLock lock(mu_);
    return std::exchange(told_, Told());
  }

 private:
  const c10::Device device_;
  Mutex mu_;
  Told told_ ABSL_GUARDED_BY(mu_);
};

class MemoryObserverTest : public ::testing::Test {
 protected:
  ~MemoryObserverTest() override {
    if (peaks_ != nullptr) IgnoreBackwards(*peaks_);
    EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr);
  }

  at::Tensor Ones(int64_t size_bytes) {
    return at::ones({size_bytes / 4}, at::TensorOptions(world_.device()));
  }
  // Returns the output of an operator whose backward allocates and frees a tensor.
  at::Tensor Allocating() {
    return Probe(Ones(4).requires_grad_(true), {},
                 [this](const at::Tensor& grad, const UnpackSaved&) {
                   Ones(kTensorBytes);
                   return grad;
                 });
  }
  void RunBackward() { Allocating().backward(); }

  // Expects that observers of backwards are told of a tensor that `backward` allocates, and returns
  // what they are told.
  template <typename Backward>
  Peaks::Told ExpectObserved(const Backward& backward) {
    ObserveBackwards(peaks_);
    const auto before = static_cast<int64_t>(world_.device_bytes());
    backward();
    Peaks::Told told = peaks_->Take();
    EXPECT_GE(told.peak_bytes, before + kTensorBytes);
    return told;
  }

  // Returns whether the profiler recorded memory of the device.
  bool StopProfiler() {
    const auto result = StopCpuProfiler();
    return std::any_of(result->events().begin(), result->events().end(), [this](const auto& event) {
      return event.name() == "[memory]" && event.deviceType() == world_.device().type();
    });
  }

  EmuWorld world_;
  std::shared_ptr<Peaks> peaks_ = std::make_shared<Peaks>(world_.device());
};

TEST_F(MemoryObserverTest, WhatTheDeviceRefusesIsReportedWithWhatItHas) {
  const at::Tensor kept = Ones(kTensorBytes);
  const auto inner = std::make_shared<Peaks>(world_.device());
  const auto device_bytes = static_cast<int64_t>(world_.device_bytes());
  EXPECT_THAT(world_.machine().SetMemoryLimit(0, 2 * kTensorBytes), IsOk());
  {
    const MemoryScope scope(peaks_);
    const MemoryScope inner_scope(inner);
    EXPECT_THROW(Ones(3 * kTensorBytes), c10::OutOfMemoryError);
  }
  EXPECT_EQ(peaks_->Take().wanted_bytes, device_bytes + 3 * kTensorBytes);
  EXPECT_EQ(inner->Take().wanted_bytes, device_bytes + 3 * kTensorBytes);
}

TEST_F(MemoryObserverTest, WhatOperatorsAllocateInAScopeIsToldWithItsPeaks) {
  const at::Tensor held = Ones(kTensorBytes);
  const auto before = static_cast<int64_t>(world_.device_bytes());
  {
    const MemoryScope scope(peaks_);
    Ones(2 * kTensorBytes);
    Ones(kTensorBytes);
  }
  const Peaks::Told told = peaks_->Take();
  EXPECT_EQ(told.peak_bytes, before + 2 * kTensorBytes);
  EXPECT_EQ(told.last_bytes, before);
  EXPECT_EQ(told.added_bytes, 3 * kTensorBytes);
  EXPECT_EQ(told.calls, 4);
}

TEST_F(MemoryObserverTest, BehindAScopeNothingIsTold) {
  { const MemoryScope scope(peaks_); }
  Ones(kTensorBytes);
  EXPECT_EQ(peaks_->Take().calls, 0);
}

TEST_F(MemoryObserverTest, AnotherThreadIsNotObserved) {
  const MemoryScope scope(peaks_);
  std::thread([this] { Ones(kTensorBytes); }).join();
  EXPECT_EQ(peaks_->Take().calls, 0);
}

TEST_F(MemoryObserverTest, WithoutAnObserverAllocatorsHaveNothingToReport) {
  const MemoryScope scope(nullptr);
  EXPECT_FALSE(c10::memoryProfilingEnabled());
}

TEST_F(MemoryObserverTest, OfNestedScopesEveryObserverIsToldOnce) {
  const auto inner_peaks = std::make_shared<Peaks>(world_.device());
  const MemoryScope outer(peaks_);
  {
    const MemoryScope inner(inner_peaks);
    const MemoryScope again(peaks_);
    Ones(kTensorBytes);
  }
  EXPECT_EQ(peaks_->Take().calls, 2);
  EXPECT_EQ(inner_peaks->Take().calls, 2);
  Ones(kTensorBytes);
  EXPECT_EQ(peaks_->Take().calls, 2);
  EXPECT_EQ(inner_peaks->Take().calls, 0);
}

TEST_F(MemoryObserverTest, ABackwardIsObservedOnItsWorkerThreads) {
  const Peaks::Told told = ExpectObserved([this] { RunBackward(); });
  EXPECT_EQ(told.threads.count(std::this_thread::get_id()), 0u);
}

TEST_F(MemoryObserverTest, LeavesToWhichABackwardAddsAreToldInTheirOrder) {
  ObserveBackwards(peaks_);
  const at::Tensor first = Ones(4).requires_grad_(true), last = Ones(4).requires_grad_(true);
  (first.sin() * last).backward();
  EXPECT_THAT(peaks_->Take().leaves,
              ::testing::ElementsAre(last.unsafeGetTensorImpl(), first.unsafeGetTensorImpl()));
  torch::autograd::grad({first.sin()}, {first});
  EXPECT_THAT(peaks_->Take().leaves, ::testing::IsEmpty());
}

TEST_F(MemoryObserverTest, ABackwardThatNobodyObservesAnyMoreIsNotTold) {
  ObserveBackwards(peaks_);
  IgnoreBackwards(*peaks_);
  RunBackward();
  EXPECT_EQ(peaks_->Take().calls, 0);
}

TEST_F(MemoryObserverTest, AllWhoWantToObserveBackwardsAreToldOnce) {
  const auto other = std::make_shared<Peaks>(world_.device());
  ObserveBackwards(peaks_);
  ObserveBackwards(other);
  ObserveBackwards(peaks_);
  RunBackward();
  const int64_t calls = peaks_->Take().calls;
  EXPECT_GT(calls, 0);
  EXPECT_EQ(other->Take().calls, calls);
  IgnoreBackwards(*other);
  RunBackward();
  EXPECT_EQ(peaks_->Take().calls, calls);
  EXPECT_EQ(other->Take().calls, 0);
}

// Python's engine is called directly, without Pinion's in between.
TEST_F(MemoryObserverTest, ABackwardThatPassesNoEngineOfOursIsObserved) {
  ExpectObserved([this] {
    const at::Tensor y = Allocating();
    torch::autograd::Engine::get_base_engine().execute(
        {torch::autograd::impl::gradient_edge(y)}, {at::ones_like(y)}, /*keep_graph=*/false,
        /*create_graph=*/false, /*accumulate_grad=*/true);
  });
}

// As a program does: by a hook on a tensor, of a leaf or not, and before a node.
using SetHook = std::function<void(const at::Tensor& leaf, const at::Tensor& y,
                                   const std::function<at::Tensor(const at::Tensor&)>& hook)>;
struct BeforeNode final : torch::autograd::FunctionPreHook {
  explicit BeforeNode(std::function<at::Tensor(const at::Tensor&)> of_each)
      : hook(std::move(of_each)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    return {hook(grads.front())};
  }
  const std::function<at::Tensor(const at::Tensor&)> hook;
};
const SetHook kSetHooks[] = {
    [](const at::Tensor& leaf, const at::Tensor&, const auto& hook) { leaf.register_hook(hook); },
    [](const at::Tensor&, const at::Tensor& y, const auto& hook) { y.register_hook(hook); },
    [](const at::Tensor&, const at::Tensor& y, const auto& hook) {
      y.grad_fn()->add_pre_hook(std::make_unique<BeforeNode>(hook));
    },
};

// The engine calls hooks before it tells of their node.
TEST_F(MemoryObserverTest, HooksOfABackwardAreObserved) {
  { const SavedTensorScope scope(nullptr); }  // the engine is ours from now on
  for (const SetHook& set_hook : kSetHooks) {
    for (const bool by_grad : {false, true}) {
      const at::Tensor leaf = Ones(4).requires_grad_(true);
      const at::Tensor y = leaf * 2;
      set_hook(leaf, y, [this](const at::Tensor& grad) {
        Ones(kTensorBytes);
        return grad;
      });
      const Peaks::Told told = ExpectObserved([&] {
        if (by_grad) {
          torch::autograd::grad({y}, {leaf});
        } else {
          y.backward();
        }
      });
      EXPECT_EQ(told.unobserved, 0);
      EXPECT_EQ(peaks_.use_count(), 1) << "a backward that has ended keeps no observer";
      EXPECT_FALSE(c10::memoryProfilingEnabled());
    }
  }
}

TEST_F(MemoryObserverTest, ABackwardThatPassesNoEngineOfOursTellsThatItsHooksAreUnobserved) {
  const at::Tensor y = Ones(4).requires_grad_(true) * 2;
  const auto backward = [&] {
    torch::autograd::Engine::get_base_engine().execute(
        {torch::autograd::impl::gradient_edge(y)}, {at::ones_like(y)}, /*keep_graph=*/true,
        /*create_graph=*/false, /*accumulate_grad=*/true);
    return peaks_->Take().unobserved;
  };
  ObserveBackwards(peaks_);
  EXPECT_GT(backward(), 0);
  const MemoryScope scope(peaks_);
  EXPECT_EQ(backward(), 0) << "LibTorch carries the scope to its workers";
}

// Observes what backward operators allocate, and the sum of two gradients.
TEST_F(MemoryObserverTest, NodesThatReadNothingThatWasSavedAreObserved) {
  const at::Tensor x = Ones(kTensorBytes).requires_grad_(true);
  const at::Tensor y = (x + 1).sum() + (x + 2).sum();
  ExpectObserved([&] { y.backward(); });
}

TEST_F(MemoryObserverTest, ABackwardWithinABackwardIsObserved) {
  const auto backward = [this](const at::Tensor& grad, const UnpackSaved&) {
    const at::AutoGradMode grad_mode(true);
    RunBackward();
    return grad;
  };
  ExpectObserved([&] { Probe(Ones(4).requires_grad_(true), {}, backward).backward(); });
}

TEST_F(MemoryObserverTest, TheOutermostNodeIsTheOneThatRunsABackwardOfItsOwn) {
  ObserveBackwards(peaks_);
  uint64_t outer = 0, inner = 0;
  const auto read_within = [&](const at::Tensor& grad, const UnpackSaved&) {
    inner = CurrentBackwardNode();
    EXPECT_EQ(OutermostBackwardNode(), outer);
    return grad;
  };
  const auto backward = [&](const at::Tensor& grad, const UnpackSaved&) {
    outer = CurrentBackwardNode();
    EXPECT_EQ(OutermostBackwardNode(), outer);
    const at::AutoGradMode grad_mode(true);
    Probe(Ones(4).requires_grad_(true), {}, read_within).backward();
    EXPECT_EQ(OutermostBackwardNode(), outer);
    return grad;
  };
  Probe(Ones(4).requires_grad_(true), {}, backward).backward();
  EXPECT_NE(inner, 0);
  EXPECT_NE(inner, outer);
  EXPECT_EQ(OutermostBackwardNode(), 0);
}

// Keeps a copy of what is saved, and lends nodes a copy of that.
struct LendingPacker final : public SavedTensorPacker {
  struct Lending final : public SavedTensor {
    at::Tensor Unpack() override {
      ++packer->unpacks;
      const at::Tensor copy = saved.clone();
      packer->lent = copy.storage().getWeakStorageImpl();
      return Lend(copy, /*node_gets_copy=*/true);
    }
    at::Tensor saved;
    LendingPacker* packer = nullptr;
  };
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    auto lending = std::make_unique<Lending>();
    lending->saved = tensor.detach().clone();
    lending->packer = this;
    return lending;
  }
  int unpacks = 0;
  c10::weak_intrusive_ptr<c10::StorageImpl> lent{c10::intrusive_ptr<c10::StorageImpl>()};
};

TEST_F(MemoryObserverTest, WhatAnObservedNodeWasLentIsFreeWhenTheNextOneBegins) {
  const auto packer = std::make_shared<LendingPacker>();
  const at::Tensor x = Ones(kTensorBytes).requires_grad_(true) + 1;
  at::Tensor y;
  {
    const SavedTensorScope scope(packer);
    y = x.sin();
  }
  ObserveBackwards(peaks_);
  bool was_lent = false, is_free = false;
  y.register_hook([&](const at::Tensor& grad) {
    was_lent = !packer->lent.expired();
    return grad;
  });
  x.register_hook([&](const at::Tensor& grad) {
    is_free = packer->lent.expired();
    return grad;
  });
  y.sum().backward();
  EXPECT_EQ(packer->unpacks, 1);
  EXPECT_FALSE(was_lent);
  EXPECT_TRUE(is_free);
}

// No engine would remove the thread's observer, so the thread would stay observed.
TEST_F(MemoryObserverTest, ANodeThatAProgramCallsByItselfLeavesNothingBehind) {
  ObserveBackwards(peaks_);
  const at::Tensor y = Ones(4).requires_grad_(true) * 2;
  (*y.grad_fn())({Ones(4)});
  EXPECT_FALSE(c10::memoryProfilingEnabled());
}

TEST_F(MemoryObserverTest, BackwardsAreObservedOnlyAsLongAsTheObserverLives) {
  ObserveBackwards(peaks_);
  const std::weak_ptr<Peaks> weak = peaks_;
  peaks_.reset();
  EXPECT_TRUE(weak.expired());
  bool reports = true;
  const at::Tensor carrier = Ones(4).requires_grad_(true);
  Probe(carrier, {}, [&reports](const at::Tensor& grad, const UnpackSaved&) {
    reports = c10::memoryProfilingEnabled();
    return grad;
  }).backward();
  EXPECT_FALSE(reports);
}

TEST_F(MemoryObserverTest, InARunningProfilerNothingIsObservedAndTheProfilerSeesAll) {
  StartCpuProfiler();
  {
    const MemoryScope scope(peaks_);
    Ones(kTensorBytes);
  }
  EXPECT_TRUE(StopProfiler());
  EXPECT_EQ(peaks_->Take().calls, 0);
}

TEST_F(MemoryObserverTest, InARunningProfilerBackwardsAreNotObserved) {
  ObserveBackwards(peaks_);
  StartCpuProfiler();
  RunBackward();
  EXPECT_TRUE(StopProfiler());
  const Peaks::Told told = peaks_->Take();
  EXPECT_EQ(told.calls, 0);
  EXPECT_EQ(told.unobserved, 0);
}

TEST_F(MemoryObserverTest, AProfilerMayStartBehindAScope) {
  {
    const MemoryScope scope(peaks_);
    Ones(kTensorBytes);
  }
  peaks_->Take();
  StartCpuProfiler();
  Ones(kTensorBytes);
  EXPECT_TRUE(StopProfiler());
  EXPECT_EQ(peaks_->Take().calls, 0);
}

TEST_F(MemoryObserverTest, AProfilerMayStartBehindABackwardThatWasObserved) {
  ObserveBackwards(peaks_);
  RunBackward();
  EXPECT_GT(peaks_->Take().calls, 0);
  StartCpuProfiler();
  Ones(kTensorBytes);
  EXPECT_TRUE(StopProfiler());
}

}  // namespace
}  // namespace pinion::testing
