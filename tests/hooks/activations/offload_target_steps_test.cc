// Checks a memory target when a step differs from its plan, and when several threads save.

#include <ATen/TensorOperators.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/planner/explain_plan.h"
#include "pinion/engine/schedule/plan_validator.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/tier/torch_tier.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/cpu_profiler.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace offload_target_steps_test {

constexpr int64_t kTensorBytes = 256 * kKiB;
constexpr int kNodes = 8;

class OffloadTargetSteps : public ::testing::Test {
 protected:
  std::shared_ptr<OffloadSession> NewSession(uint64_t target_bytes) {
    return world_.NewSession(WithTarget(target_bytes));
  }
  at::Tensor Ones(int64_t size_bytes) {
    return at::ones({size_bytes / 4}, at::TensorOptions(world_.device()));
  }
  // Nodes that save a tensor each and record its first number when backward reads it.
  at::Tensor Chain(at::Tensor y, int first, int nodes) {
    for (int i = first; i < first + nodes; ++i) {
      y = Probe(y, {Activation(carrier_, {kTensorBytes / 4}, i)},
                [this](const at::Tensor& grad, const UnpackSaved& unpack) {
                  seen_.push_back(unpack().front()[0].to(at::kCPU).item<float>());
                  return grad;
                });
    }
    return y;
  }
  void Backward(at::Tensor y) {
    seen_.clear();
    y.backward();
    EXPECT_THAT(seen_, ::testing::ElementsAre(7, 6, 5, 4, 3, 2, 1, 0));
    y.reset();
    EXPECT_THAT(world_.Synchronize(), IsOk());
  }
  // The steps also run `work` computations that save nothing.
  void RunSteps(const std::shared_ptr<OffloadSession>& session, uint64_t steps, int work = 0) {
    const at::Tensor other = Ones(kTensorBytes);
    for (uint64_t step = 0; step < steps; ++step) {
      const at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
        y = Chain(y, 0, kNodes);
        for (int i = 0; i < work; ++i) at::mul(other, 2);
      });
      Backward(y);
    }
  }
  // A step of two scopes; the program allocates `between_bytes` between them.
  void RunStepInTwoScopes(const std::shared_ptr<OffloadSession>& session, int64_t between_bytes) {
    at::Tensor y = InScope(session, [&] { return Chain(carrier_, 0, kNodes / 2); });
    Ones(between_bytes);
    y = InScope(session, [&] { return Chain(y, kNodes / 2, kNodes / 2); });
    Backward(std::move(y));
  }
  // Expects that at least the first step, which has no plan, is offloaded.
  void ExpectOffloaded(const OffloadSession& session) {
    EXPECT_GE(session.GetStats().offloaded, static_cast<uint64_t>(kNodes));
    EXPECT_GE(session.GetStats().evicted_bytes, static_cast<uint64_t>(kNodes * kTensorBytes));
    EXPECT_GE(session.GetStats().fetched_bytes, static_cast<uint64_t>(kNodes * kTensorBytes));
  }
  // Returns the peak without offload.
  uint64_t PlainPeakBytes() {
    world_.ResetPeak();
    Backward(Chain(carrier_, 0, kNodes));
    return world_.peak_device_bytes();
  }

  EmuWorld world_;
  at::Tensor carrier_ = Ones(4).requires_grad_(true);
  std::vector<float> seen_;
};

// Until a step was measured, whatever was found before, and another one recorded.
constexpr uint64_t kSteps = 3 * PlanValidator::kEvery;

// The program allocates a little after planning, so the plan is only slightly wrong.
TEST_F(OffloadTargetSteps, AStepThatBeginsWithALittleMoreThanItsRecordKeepsWithinTheTarget) {
  const auto planned_peak = [this](const OffloadSession& session, uint64_t target_bytes) {
    EXPECT_LE(world_.peak_device_bytes(), target_bytes);
    ExpectOffloaded(session);
    return world_.peak_device_bytes();
  };
  const auto run_one = [this](const std::shared_ptr<OffloadSession>& session) {
    world_.ResetPeak();
    RunSteps(session, 1);
  };
  // Objects are coarse, but a plan's own peak is a target that it meets to the byte.
  const uint64_t enough_bytes = PlainPeakBytes() - kTensorBytes;
  const uint64_t target_bytes = [&] {
    const std::shared_ptr<OffloadSession> session = NewSession(enough_bytes);
    RunSteps(session, kSteps);
    run_one(session);
    return planned_peak(*session, enough_bytes);
  }();
  const std::shared_ptr<OffloadSession> session = NewSession(target_bytes);
  RunSteps(session, kSteps);
  run_one(session);
  ASSERT_EQ(planned_peak(*session, target_bytes), target_bytes) << "the test's premise";

  const std::string planned = session->Explain(0);
  const at::Tensor stays = Ones(4096);
  run_one(session);
  planned_peak(*session, target_bytes);
  EXPECT_NE(session->Explain(0), planned) << "it was to run by another plan";
  RunSteps(session, kSteps);
  run_one(session);
  planned_peak(*session, target_bytes);
  EXPECT_EQ(session->GetStats().steps_over_target, 0u);
}

// The scope may be in the model's own forward.
TEST_F(OffloadTargetSteps, WhatAnEvaluationBehindAStepAllocatesIsNotTheSteps) {
  const std::shared_ptr<OffloadSession> session = NewSession(PlainPeakBytes() - kTensorBytes);
  at::Tensor outputs;
  for (uint64_t step = 0; step < kSteps; ++step) {
    RunSteps(session, 1);
    const at::NoGradGuard no_grad;
    outputs = InScope(session, [&] { return Ones(2 * kNodes * kTensorBytes).narrow(0, 0, 1); });
    outputs = outputs.clone();
  }
  const uint64_t before_bytes = session->GetStats().evicted_bytes;
  RunSteps(session, 1);
  const uint64_t moved_bytes = session->GetStats().evicted_bytes - before_bytes;
  EXPECT_GT(moved_bytes, 0u);
  EXPECT_LT(moved_bytes, static_cast<uint64_t>(kNodes * kTensorBytes));
  EXPECT_EQ(session->GetStats().steps_over_target, 0u);
}

TEST_F(OffloadTargetSteps, StepsThatBeginWithTooMuchLeaveThePlanToOthers) {
  const uint64_t target_bytes = PlainPeakBytes() - kTensorBytes;
  for (const int in_a_row : {1, 4}) {
    const std::shared_ptr<OffloadSession> session = NewSession(target_bytes);
    const auto moved_bytes = [&] {
      const uint64_t before_bytes = session->GetStats().evicted_bytes;
      RunSteps(session, 1);
      return session->GetStats().evicted_bytes - before_bytes;
    };
    RunSteps(session, kSteps);
    const uint64_t planned_bytes = moved_bytes();
    ASSERT_GT(planned_bytes, 0u);
    ASSERT_LT(planned_bytes, static_cast<uint64_t>(kNodes * kTensorBytes));
    for (int odd = 0; odd < 9; ++odd) {
      {
        const at::Tensor stays = Ones(5 * kTensorBytes);
        for (int step = 0; step < in_a_row; ++step) {
          EXPECT_EQ(moved_bytes(), static_cast<uint64_t>(kNodes * kTensorBytes)) << "the least";
        }
      }
      EXPECT_EQ(moved_bytes(), planned_bytes) << odd << ", after " << in_a_row;
    }
  }
}

// Streamed weights count from before their allocation, by another thread for example.
TEST_F(OffloadTargetSteps, AStepThatBeginsWhileWeightsAreBeingFetchedIsNotPlannedForMore) {
  const std::shared_ptr<OffloadSession> session = NewSession(PlainPeakBytes() - kTensorBytes);
  RunSteps(session, kSteps);
  const auto host = TorchHostTier(SmallTier(), world_.backend(), world_.device().type());
  ASSERT_THAT(host, IsOk());
  const auto tier = (*host)->ForDevice(0);
  ASSERT_THAT(tier, IsOk());
  const CapturedLog log;
  const at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
    {
      const StreamedBytes fetched((*tier)->share(), std::make_shared<StreamedModel>(), 64 * kMiB);
      y = Chain(y, 0, 1);
    }
    y = Chain(y, 1, kNodes - 1);
  });
  Backward(y);
  RunSteps(session, 4);
  EXPECT_EQ(log.text(), "");
}

// For example metrics in every fourth step. The allocations are freed at once.
TEST_F(OffloadTargetSteps, WhatSomeStepsAllocateBetweenTwoAccessesExceedsTheTargetOnce) {
  const uint64_t target_bytes = PlainPeakBytes() - kTensorBytes;
  for (const int after_node : {6, kNodes, kNodes + 1}) {  // the last one: behind the scope
    SCOPED_TRACE(after_node);
    const std::shared_ptr<OffloadSession> session = NewSession(target_bytes);
    const auto run_steps = [&](int steps) {
      for (int step = 1; step <= steps; ++step) {
        const auto measure = [&](int node) {
          if (node == after_node && step % 4 == 0) Ones(4 * kTensorBytes);
        };
        const at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
          for (int node = 0; node < kNodes; ++node) {
            measure(node);
            y = Chain(y, node, 1);
          }
          measure(kNodes);
        });
        measure(kNodes + 1);
        Backward(y);
      }
      return session->GetStats().steps_over_target;
    };
    const uint64_t first = run_steps(8);
    EXPECT_GE(first, 1u);
    // Behind the scope an upper bound counts, with all small allocations.
    EXPECT_LE(first, after_node > kNodes ? 2u : 1u);
    EXPECT_EQ(run_steps(kSteps), first);
    ExpectOffloaded(*session);
    EXPECT_LT(session->GetStats().evicted_bytes, (kSteps + 8) * kNodes * kTensorBytes)
        << "the steps are planned";
  }
}

// A decoder that makes one more token in each step: a step is like the last one until it goes on.
TEST_F(OffloadTargetSteps, StepsThatGoOnLongerExceedTheTargetOnce) {
  const std::shared_ptr<OffloadSession> session = NewSession(PlainPeakBytes() - kTensorBytes);
  for (int nodes = kNodes; nodes < 2 * kNodes; ++nodes) {
    at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
      for (int node = 0; node < nodes; ++node) {
        Ones(2 * kTensorBytes);
        y = Chain(y, node, 1);
      }
    });
    y.backward();
    EXPECT_EQ(session->GetStats().steps_over_target, nodes == kNodes ? 0u : 1u);
  }
  ExpectOffloaded(*session);
}

TEST_F(OffloadTargetSteps, AKnownStepThatDiesOfItsTargetIsCounted) {
  const uint64_t target_bytes = PlainPeakBytes() - kTensorBytes;
  const std::shared_ptr<OffloadSession> session = NewSession(target_bytes);
  const CapturedLog log;
  RunSteps(session, 4);
  ASSERT_THAT(world_.machine().SetMemoryLimit(0, target_bytes), IsOk());
  for (const int64_t more_bytes : {2 * target_bytes, 3 * target_bytes}) {
    EXPECT_THROW(InScope(session, carrier_,
                         [&](at::Tensor& y) {
                           y = Chain(y, 0, kNodes);
                           Ones(more_bytes);
                         }),
                 c10::OutOfMemoryError);
  }
  EXPECT_EQ(session->GetStats().steps_over_target, 2u);
  EXPECT_GT(session->GetStats().most_bytes_over_target, 2 * target_bytes);
  EXPECT_THAT(log.text(), ::testing::HasSubstr("more on the device than memory_target_bytes"));
  RunSteps(session, 4);
  EXPECT_EQ(session->GetStats().steps_over_target, 2u);
}

// A session copies the bytes anew if it finds them under another version counter, so the record of
// the step has to count them anew.
TEST_F(OffloadTargetSteps, WhatIsSavedUnderAnotherVersionCounterIsAnotherObjectOfTheRecord) {
  const std::shared_ptr<OffloadSession> session = NewSession(64 * kTensorBytes);
  for (int step = 0; step < 2; ++step) {
    const at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
      const at::Tensor x = Activation(carrier_, {kTensorBytes / 4});
      for (const at::Tensor& saved : {x, x.variable_data(), x}) y = Probe(y, {saved}, Read);
    });
    y.backward();
  }
  const std::vector<PlannedStep> planned = session->PlannedSteps(0);
  ASSERT_EQ(planned.size(), 1u);
  EXPECT_THAT(planned.front().step.accesses, ::testing::ElementsAre(0, 1, 2, 2, 1, 0));
}

// Only LibTorch's allocator observes memory between two scopes.
TEST_F(OffloadTargetSteps, APeakBetweenTwoScopesOfAStepIsCounted) {
  const std::shared_ptr<OffloadSession> session = NewSession(64 * kTensorBytes);
  RunStepInTwoScopes(session, 65 * kTensorBytes);
  EXPECT_EQ(session->GetStats().steps_over_target, 1u);
  EXPECT_GE(session->GetStats().most_bytes_over_target, uint64_t{kTensorBytes});
}

// A peak that LibTorch's allocator had before hides none of a step.
TEST_F(OffloadTargetSteps, APeakBetweenTwoScopesOfAStepIsCountedBehindAHigherOne) {
  const std::shared_ptr<OffloadSession> session = NewSession(64 * kTensorBytes);
  Ones(80 * kTensorBytes);
  RunStepInTwoScopes(session, 65 * kTensorBytes);
  EXPECT_EQ(session->GetStats().steps_over_target, 1u);
}

// LibTorch's engine calls hooks before it tells of their node. Python's begins a backward itself.
TEST_F(OffloadTargetSteps, WhatHooksOnGradientsAllocateIsCounted) {
  for (const bool is_pythons : {false, true}) {
    for (const bool peak_was_higher : {false, true}) {
      SCOPED_TRACE(::testing::Message() << is_pythons << ", " << peak_was_higher);
      const std::shared_ptr<OffloadSession> session = NewSession(64 * kTensorBytes);
      if (peak_was_higher) Ones(80 * kTensorBytes);
      if (!peak_was_higher) world_.ResetPeak();
      for (const int64_t hook_bytes : {1 * kTensorBytes, 65 * kTensorBytes}) {
        at::Tensor middle;
        const at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
          y = middle = Chain(y, 0, kNodes / 2);
          y = Chain(y, kNodes / 2, kNodes / 2);
        });
        middle.register_hook([this, hook_bytes](const at::Tensor& grad) {
          Ones(hook_bytes);
          return grad;
        });
        middle.reset();
        if (is_pythons) {
          torch::autograd::Engine::get_base_engine().execute(
              {torch::autograd::impl::gradient_edge(y)}, {at::ones_like(y)},
              /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
        } else {
          y.backward();
        }
        EXPECT_EQ(session->GetStats().steps_over_target, hook_bytes > kTensorBytes ? 1u : 0u);
      }
    }
  }
}

// A profiler started before the scope receives the memory events exclusively.
TEST_F(OffloadTargetSteps, StepsThatAProfilerHidesAreCountedByTheirSavesAndReads) {
  const std::shared_ptr<OffloadSession> session = NewSession(1);
  StartCpuProfiler();
  RunSteps(session, 3);
  StopCpuProfiler();
  ExpectOffloaded(*session);
  EXPECT_EQ(session->GetStats().steps_over_target, 3u);
}

// Memory known at saves and reads only is not a peak.
TEST_F(OffloadTargetSteps, WhilePeaksAreHiddenByAProfilerPlansMoveWhatTheyMoved) {
  const std::shared_ptr<OffloadSession> session = NewSession(PlainPeakBytes() - kTensorBytes);
  // Only some of 8 objects are moved; the times around this text may differ.
  const auto moves = [&] {
    const std::string text = session->Explain(0);
    const size_t end = text.find("stalls:"), begin = text.rfind("; ", end);
    EXPECT_NE(end, std::string::npos) << text;
    return text.substr(begin, end - begin);
  };
  RunSteps(session, 20);
  const std::string planned = moves();
  StartCpuProfiler();
  RunSteps(session, 4 * PlanValidator::kEvery);
  StopCpuProfiler();
  EXPECT_EQ(moves(), planned);
  EXPECT_EQ(session->GetStats().steps_over_target, 0u);
}

// The first micro-batch, whose turn it is when that is seen, has nothing to be planned again for.
TEST_F(OffloadTargetSteps, AMicroBatchThatHasMoreThanItsPlanIsPlannedAgain) {
  at::Tensor weight = Ones(3 * kTensorBytes).requires_grad_(true);
  const auto micro_batch = [&](const std::shared_ptr<OffloadSession>& session, bool has_more) {
    const at::Tensor y = InScope(session, [&] {
      at::Tensor y = Chain(carrier_, 0, kNodes) + weight.sum();
      if (has_more) Ones(2 * kTensorBytes);
      return y;
    });
    Backward(y);
  };
  const auto clear = [&] { weight.mutable_grad() = carrier_.mutable_grad() = at::Tensor(); };
  micro_batch(nullptr, false);
  world_.ResetPeak();
  micro_batch(nullptr, false);
  clear();
  const std::shared_ptr<OffloadSession> session =
      NewSession(world_.peak_device_bytes() - kTensorBytes);
  const auto updates = [&](bool has_more) {
    const uint64_t before = session->GetStats().steps_over_target;
    for (int update = 0; update < 8; ++update) {
      micro_batch(session, false);
      micro_batch(session, has_more);
      clear();
    }
    return session->GetStats().steps_over_target - before;
  };
  EXPECT_EQ(updates(false), 0u);
  EXPECT_GT(updates(true), 0u) << "until it is seen";
  EXPECT_EQ(updates(true), 0u);
}

TEST_F(OffloadTargetSteps, WhatACaptureSavesBeginsNoStep) {
  const std::shared_ptr<OffloadSession> session = NewSession(64 * kTensorBytes);
  const StreamHandle stream = world_.machine().default_stream(0);
  const OffloadScope scope(session);
  ASSERT_THAT(world_.machine().SetCapturing(stream, true), IsOk());
  const at::Tensor y = Chain(carrier_, 0, 1);
  ASSERT_THAT(world_.machine().SetCapturing(stream, false), IsOk());
  ASSERT_EQ(session->GetStats().kept_capturing, 1u);
  Ones(65 * kTensorBytes);
  EXPECT_EQ(session->GetStats().steps_over_target, 0u);
}

// Later micro-batches begin with gradients; the first does not, and is planned as if it were alone.
TEST_F(OffloadTargetSteps, AFirstMicroBatchLeavesNoRoomForGradientsThatItsSuccessorsBeginWith) {
  at::Tensor weight = Ones(3 * kTensorBytes).requires_grad_(true);
  const auto micro_batch = [&](const std::shared_ptr<OffloadSession>& session) {
    const uint64_t before = session == nullptr ? 0 : session->GetStats().offloaded;
    const at::Tensor y =
        InScope(session, [&] { return Chain(carrier_, 0, kNodes) + weight.sum(); });
    Backward(y);
    return session == nullptr ? 0 : session->GetStats().offloaded - before;
  };
  const auto clear = [&] { weight.mutable_grad() = carrier_.mutable_grad() = at::Tensor(); };
  world_.ResetPeak();
  micro_batch(nullptr);
  clear();
  const uint64_t target_bytes = world_.peak_device_bytes() - kTensorBytes;
  const auto in_last_update = [&](int micro_batches) {
    const std::shared_ptr<OffloadSession> session = NewSession(target_bytes);
    uint64_t by_first = 0;
    for (int update = 0; update < 12; ++update) {
      // Later micro-batches begin when the first has a plan.
      for (int i = 0; i < (update < 6 ? 1 : micro_batches); ++i) {
        const uint64_t offloaded = micro_batch(session);
        if (i == 0) by_first = offloaded;
      }
      clear();
    }
    ExpectOffloaded(*session);
    EXPECT_EQ(session->GetStats().steps_over_target, 0u) << micro_batches;
    return by_first;
  };
  const uint64_t alone = in_last_update(1);
  EXPECT_LT(alone, static_cast<uint64_t>(kNodes));
  for (const int micro_batches : {2, 4, 6}) EXPECT_EQ(in_last_update(micro_batches), alone);
}

TEST_F(OffloadTargetSteps, GradientsOfAnotherNetworkSayNothingOnceThisOneHasRun) {
  at::Tensor other = Ones(4).requires_grad_(true);
  const std::shared_ptr<OffloadSession> session = NewSession(PlainPeakBytes() - kTensorBytes);
  const auto run = [&](const at::Tensor& leaf) {
    const at::Tensor y = InScope(session, [&] { return Chain(leaf, 0, kNodes); });
    Backward(y);
  };
  run(other);  // its gradient stays
  ASSERT_TRUE(other.grad().defined());
  for (uint64_t i = 0; i < kSteps; ++i) {
    run(carrier_);
    carrier_.mutable_grad() = at::Tensor();
  }
  ExpectOffloaded(*session);
  EXPECT_EQ(session->PlannedSteps(0).front().note, "") << "the step that ran last makes gradients";
}

TEST_F(OffloadTargetSteps, AStepThatTakesLongerThanItsPlanSaysIsPlannedAgain) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "times are never the same twice";
  const std::shared_ptr<OffloadSession> session = NewSession(PlainPeakBytes());
  RunSteps(session, kSteps, /*work=*/20);
  const std::string planned = session->Explain(0);
  RunSteps(session, kSteps, /*work=*/20);
  EXPECT_EQ(session->Explain(0), planned);
  RunSteps(session, kSteps, /*work=*/200);
  EXPECT_NE(session->Explain(0), planned);
  ExpectOffloaded(*session);
}

TEST_F(OffloadTargetSteps, AStepThatHasMoreOnTheDeviceThanItsPlanSaysIsPlannedAgain) {
  const std::shared_ptr<OffloadSession> session = NewSession(4 * PlainPeakBytes());
  RunSteps(session, kSteps);
  const std::string planned = session->Explain(0);
  const at::Tensor beside = Ones(kTensorBytes);
  RunSteps(session, kSteps);
  EXPECT_NE(session->Explain(0), planned);
  ExpectOffloaded(*session);
}

// The program references every other tensor for the whole step. These are copied in the first step,
// which offloads everything, and never again.
TEST_F(OffloadTargetSteps, WhatTheProgramKeepsIsNotCopiedOnceThatIsKnown) {
  const auto run = [this](const std::shared_ptr<OffloadSession>& session) {
    std::vector<at::Tensor> kept;
    const at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
      for (int i = 0; i < kNodes; ++i) {
        const at::Tensor saved = Activation(carrier_, {kTensorBytes / 4}, i);
        if (i % 2 == 0) kept.push_back(saved);
        y = Probe(y, {saved}, [this](const at::Tensor& grad, const UnpackSaved& unpack) {
          seen_.push_back(unpack().front()[0].to(at::kCPU).item<float>());
          return grad;
        });
      }
    });
    Backward(y);
  };
  const std::shared_ptr<OffloadSession> session = NewSession(PlainPeakBytes() - 2 * kTensorBytes);
  run(session);
  const OffloadStats first = session->GetStats();
  EXPECT_EQ(first.offloaded, static_cast<uint64_t>(kNodes));
  EXPECT_EQ(first.evicted_not_freed, static_cast<uint64_t>(kNodes / 2));
  constexpr uint64_t kMore = 4;
  world_.ResetPeak();
  for (uint64_t step = 0; step < kMore; ++step) run(session);
  const OffloadStats stats = session->GetStats();
  EXPECT_GT(stats.offloaded, first.offloaded);
  EXPECT_LE(stats.offloaded - first.offloaded, kMore * kNodes / 2);
  EXPECT_EQ(stats.evicted_not_freed, first.evicted_not_freed);
  EXPECT_LE(world_.peak_device_bytes(), session->options().memory_target_bytes);
}

// Threads number their nodes independently, so another thread's saves have no known place.
TEST_F(OffloadTargetSteps, WhatAnotherThreadSavesInAScopeKeepsWithinTheTarget) {
  const uint64_t target_bytes = PlainPeakBytes() * 8 / 10;
  const std::shared_ptr<OffloadSession> session = NewSession(target_bytes);
  for (int step = 0; step < 6; ++step) {
    SCOPED_TRACE(step);
    world_.ResetPeak();
    at::Tensor y;
    {
      const OffloadScope scope(session);
      y = Chain(carrier_, 0, 2);
      std::thread([&, state = at::ThreadLocalState()] {
        const at::ThreadLocalStateGuard guard(state);
        y = Chain(y, 2, 4);
      }).join();
      y = Chain(y, 6, 2);
    }
    Backward(y);
    EXPECT_LE(world_.peak_device_bytes(), target_bytes);
  }
  EXPECT_GT(session->GetStats().kept_as_planned, 0u);
  ExpectOffloaded(*session);
}

}  // namespace offload_target_steps_test
}  // namespace pinion::testing
