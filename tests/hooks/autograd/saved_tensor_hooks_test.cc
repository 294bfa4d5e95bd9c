// Checks scopes together with other users of autograd's hooks and of thread-local state: Python's
// saved-tensor hooks, an engine that is set later, a profiler.

#include "pinion/hooks/autograd/saved_tensor_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/profiler_legacy.h>
#include <torch/csrc/profiler/api.h>

#include <memory>
#include <utility>

#include "gtest/gtest.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/tests/hooks/support/python_like_hooks.h"

namespace pinion {
namespace {

using testing::PythonHooks;
using testing::PythonLikeEngineScope;

class Keep : public SavedTensor {
 public:
  explicit Keep(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  at::Tensor Unpack() override { return tensor_; }

 private:
  const at::Tensor tensor_;
};

class CountingPacker : public SavedTensorPacker {
 public:
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    ++packed;
    return std::make_unique<Keep>(DetachedAlias(tensor));
  }

  int packed = 0;
};

class SavedTensorHooksTest : public ::testing::Test {
 protected:
  // Runs an operator that saves one tensor.
  void SaveOne() { at::exp(x_); }
  int packed_by_python() { return python_.packed(); }

  const PythonLikeEngineScope python_;
  const at::Tensor x_ = at::ones({4}).requires_grad_(true);
  const std::shared_ptr<CountingPacker> packer_ = std::make_shared<CountingPacker>();
};

TEST_F(SavedTensorHooksTest, AGraphThatOutlivesItsScopeHasNoUseForThePacker) {
  auto packer = std::make_shared<CountingPacker>();
  const std::weak_ptr<CountingPacker> left = packer;
  at::Tensor y;
  {
    const SavedTensorScope scope(std::move(packer));
    y = at::exp(x_);
    EXPECT_EQ(left.lock()->packed, 1);
  }
  EXPECT_TRUE(left.expired());
  y.sum().backward();
}

TEST_F(SavedTensorHooksTest, PythonsHooksInsideAScopeWin) {
  const SavedTensorScope scope(packer_);
  SaveOne();
  EXPECT_EQ(packer_->packed, 1);
  {
    const PythonHooks hooks;
    SaveOne();
    EXPECT_EQ(packer_->packed, 1);
    EXPECT_EQ(packed_by_python(), 1);
  }
  SaveOne();
  EXPECT_EQ(packer_->packed, 2);
  EXPECT_EQ(packed_by_python(), 1);
}

TEST_F(SavedTensorHooksTest, AScopeInsidePythonsHooksWins) {
  const PythonHooks hooks;
  SaveOne();
  EXPECT_EQ(packed_by_python(), 1);
  {
    const SavedTensorScope scope(packer_);
    SaveOne();
    EXPECT_EQ(packer_->packed, 1);
    {
      const PythonHooks inner;
      const SavedTensorScope innermost(packer_);
      SaveOne();
      EXPECT_EQ(packer_->packed, 2);
    }
    EXPECT_EQ(packed_by_python(), 1);
  }
  SaveOne();
  EXPECT_EQ(packed_by_python(), 2);
}

// torch.compile traces like this; tensors saved meanwhile are not the program's.
TEST_F(SavedTensorHooksTest, WhileLibTorchTracesNobodyPacks) {
  const SavedTensorScope scope(packer_);
  at::SavedTensorDefaultHooks::set_tracing(true);
  SaveOne();
  EXPECT_EQ(ActivePacker(), nullptr);
  at::SavedTensorDefaultHooks::set_tracing(false);
  EXPECT_EQ(packer_->packed, 0);
  SaveOne();
  EXPECT_EQ(packer_->packed, 1);
}

// Loading Python's torch after the first scope replaces the engine.
TEST_F(SavedTensorHooksTest, AnEngineThatIsSetLaterIsFoundByTheNextScope) {
  {
    const SavedTensorScope scope(packer_);
    SaveOne();
  }
  torch::autograd::set_default_engine_stub(&torch::autograd::Engine::get_base_engine);
  PythonLikeEngineScope::Set();
  SaveOne();
  EXPECT_EQ(packer_->packed, 1);
  const SavedTensorScope scope(packer_);
  SaveOne();
  EXPECT_EQ(packer_->packed, 2);
  const PythonHooks hooks;
  SaveOne();
  EXPECT_EQ(packed_by_python(), 1) << "and the new engine is asked";
}

// --- A profiler, which shares the thread's debug info with scopes ---

// LibTorch's older profiler, whose debug info behaves like the newer one's. The newer one (Kineto)
// starts a thread, for which a process that exits at once may wait up to 5 minutes.
void StartProfiler() {
  torch::autograd::profiler::enableProfilerLegacy(
      torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::CPU));
}

void StopProfiler() { torch::autograd::profiler::disableProfilerLegacy(); }

bool ProfilerRuns() {
  return c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr;
}

bool ScopeIsOpen() { return CurrentPacker() != nullptr; }

TEST_F(SavedTensorHooksTest, AProfilerFromBeforeAScopeMayStopInside) {
  StartProfiler();
  {
    const SavedTensorScope scope(packer_);
    EXPECT_TRUE(ProfilerRuns());
    StopProfiler();
    EXPECT_FALSE(ProfilerRuns());
    EXPECT_TRUE(ScopeIsOpen());
    SaveOne();
    EXPECT_EQ(packer_->packed, 1);
  }
  EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr);
}

TEST_F(SavedTensorHooksTest, AProfilerThatStartsInsideAScopeMayStopAfterIt) {
  {
    const SavedTensorScope scope(packer_);
    StartProfiler();
    SaveOne();
    EXPECT_EQ(packer_->packed, 1);
  }
  EXPECT_TRUE(ProfilerRuns());
  EXPECT_FALSE(ScopeIsOpen());
  SaveOne();
  EXPECT_EQ(packer_->packed, 1);
  StopProfiler();
  EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr);
}

struct Producer : c10::DebugInfoBase {};

TEST_F(SavedTensorHooksTest, AllThatOthersHavePushedStaysInItsOrder) {
  const c10::DebugInfoGuard producer(c10::DebugInfoKind::PRODUCER_INFO,
                                     std::make_shared<Producer>());
  const SavedTensorScope outer(packer_);
  StartProfiler();
  {
    const c10::DebugInfoGuard context(c10::DebugInfoKind::INFERENCE_CONTEXT,
                                      std::make_shared<Producer>());
    const SavedTensorScope inner(std::make_shared<CountingPacker>());
    SaveOne();
    EXPECT_EQ(packer_->packed, 0);
  }
  SaveOne();
  EXPECT_EQ(packer_->packed, 1);
  StopProfiler();
  EXPECT_NE(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PRODUCER_INFO), nullptr);
  EXPECT_TRUE(ScopeIsOpen());
}

}  // namespace
}  // namespace pinion
