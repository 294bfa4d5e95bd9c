// Checks nested scopes, and scopes of several threads, in one session.

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <latch>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/tests/hooks/activations/graphs_fixture.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace offload_scopes_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kSide = 64;  // a tensor fills a window of the fixture

at::Tensor ObserveOne(const at::Tensor& y, const at::Tensor& carrier, int first,
                      std::vector<at::Tensor>* seen) {
  return Observe(y, {Activation(carrier, {kSide, kSide}, first)}, seen);
}

class OffloadScopes : public GraphsFixture {
 protected:
  // Expects activation i in seen[i].
  static void ExpectSeen(const std::vector<std::vector<at::Tensor>>& seen, at::IntArrayRef sizes) {
    for (size_t i = 0; i < seen.size(); ++i) {
      EXPECT_TRUE(SameBytes(seen[i].at(0), ActivationValues(sizes, static_cast<int>(i)))) << i;
    }
  }
};

// A module's own scope inside its caller's is part of the caller's forward.
TEST_F(OffloadScopes, BackwardFetchesAheadAcrossNestedScopesOfOneSession) {
  constexpr int kTensors = 12;
  const auto step = [&](bool nested) {
    std::vector<std::vector<at::Tensor>> seen(kTensors);
    const OffloadStats before = stats();
    const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
      for (int i = 0; i < kTensors; ++i) {
        std::optional<OffloadScope> inner;
        if (nested && i % 3 == 1) inner.emplace(world_.session());
        y = ObserveOne(y, carrier_, i, &seen[i]);
      }
    });
    y.backward();
    ExpectSeen(seen, {kSide, kSide});
    return stats().fetched_on_demand - before.fetched_on_demand;
  };
  const uint64_t flat = step(false);
  ASSERT_LT(flat, 3u) << "the test's premise: the others are fetched ahead";
  EXPECT_EQ(step(true), flat);
}

// Small tensors of a scope wait for a batch. Those of a nested scope wait in the outer one's.
TEST_F(OffloadScopes, SmallTensorsOfNestedScopesShareACopy) {
  constexpr int kTensors = 16;
  const auto session = world_.NewSession(SmallWindows(kMiB));
  std::vector<std::vector<at::Tensor>> seen(kTensors);
  const at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
    for (int i = 0; i < kTensors; ++i) {
      const OffloadScope inner(session);
      y = Observe(y, {activation({512}, i)}, &seen[i]);
    }
  });
  EXPECT_EQ(session->GetStats().groups, 1u);
  EXPECT_EQ(session->GetStats().grouped, kTensors);
  y.backward();
  ExpectSeen(seen, {512});
}

// Threads number their nodes independently. The end of another thread's scope, or another node
// number, must not make an operator's tensors count as ready to offload.
TEST_F(OffloadScopes, WhatOneThreadSavesIsNotReadWhenTheScopeOfAnotherEnds) {
  const at::Tensor other_carrier = NewCarrier();
  std::vector<at::Tensor> other_seen;
  std::latch saved(1);
  std::latch other_done(1);
  at::Tensor y;
  std::thread forward([&] {
    const OffloadScope scope(world_.session());
    at::Tensor noise = activation({kSide, kSide}, 1);
    y = Observe(carrier_, {noise}, &seen_);
    saved.count_down();
    other_done.wait();
    noise.variable_data().copy_(ActivationValues({kSide, kSide}, 7));  // the operator continues
  });
  saved.wait();
  const at::Tensor other = InScope(world_.session(), other_carrier, [&](at::Tensor& y) {
    for (int i = 0; i < 4; ++i) y = ObserveOne(other_carrier, other_carrier, i, &other_seen);
  });
  EXPECT_EQ(stats().offloaded, 5u);
  other_done.count_down();
  forward.join();
  y.backward();
  other.backward();
  EXPECT_TRUE(SameBytes(seen_.at(0), ActivationValues({kSide, kSide}, 7)));
}

// A task inherits the scope of the thread that started it, and may outlive it.
TEST_F(OffloadScopes, ATaskThatOutlivesTheScopeThatItWasStartedInMayOpenOneOfItsOwn) {
  for (const bool before : {true, false}) {
    SCOPED_TRACE(before ? "opened before the other has ended" : "opened afterwards");
    const uint64_t evicted_before = stats().evicted_bytes;
    std::vector<std::vector<at::Tensor>> seen(4);
    at::Tensor y = carrier_;
    std::latch opened(1), ended(1);
    std::optional<OffloadScope> started_in(std::in_place, world_.session());
    std::thread task([&, state = at::ThreadLocalState()] {
      const at::ThreadLocalStateGuard guard(state);
      std::optional<OffloadScope> own;
      if (before) own.emplace(world_.session());
      opened.count_down();
      ended.wait();
      if (!before) own.emplace(world_.session());
      for (int i = 0; i < 4; ++i) y = ObserveOne(y, carrier_, i, &seen[i]);
    });
    opened.wait();
    started_in.reset();
    ended.count_down();
    task.join();
    EXPECT_EQ(stats().kept_scope_ended, 0u);
    EXPECT_GT(stats().evicted_bytes, evicted_before);
    y.backward();
    ExpectSeen(seen, {kSide, kSide});
  }
}

TEST_F(OffloadScopes, ACallbackThatCarriesAScopeWhichHasEndedMayOpenOneOfItsOwn) {
  std::optional<OffloadScope> carried(std::in_place, world_.session());
  const at::ThreadLocalState state;
  carried.reset();
  const at::Tensor y = [&] {
    const at::ThreadLocalStateGuard guard(state);
    const OffloadScope own(world_.session());
    return ObserveOne(carrier_, carrier_, 1, &seen_);
  }();
  EXPECT_EQ(stats().kept_scope_ended, 0u);
  EXPECT_EQ(stats().offloaded, 1u);
  y.backward();
  EXPECT_TRUE(SameBytes(seen_.at(0), ActivationValues({kSide, kSide}, 1)));
}

TEST_F(OffloadScopes, ScopesThatEndInTheOrderInWhichTheyBeganAreToldOfByNameAndLeaveNothingBehind) {
  std::optional<OffloadScope> outer(std::in_place, world_.session());
  std::optional<NoOffloadScope> inner(std::in_place);
  {
    const CapturedLog log;
    outer.reset();
    EXPECT_THAT(log.text(), AllOf(HasSubstr("OffloadScope has ended out of order"),
                                  HasSubstr("the innermost scope is NoOffloadScope")));
  }
  const CapturedLog log;
  inner.reset();
  ObserveOne(carrier_, carrier_, 1, &seen_);
  EXPECT_EQ(stats().packed, 0u);
  EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr);
  EXPECT_THAT(log.text(), IsEmpty());
}

TEST_F(OffloadScopes, AScopeWhoseSavedTensorsAreAllOnTheCpuSaysOnceThatItOffloadsNothing) {
  const at::Tensor on_host = at::ones({kSide, kSide}).requires_grad_();
  for (int step = 0; step < 3; ++step) {
    const CapturedLog log;
    InScope(world_.session(), [&] { return step > 0 ? on_host.mul(2).sin().sum() : at::Tensor(); });
    if (step == 1) {
      EXPECT_THAT(log.text(), AllOf(HasSubstr("saved no strided tensor on "),
                                    HasSubstr("Move the model and its inputs there")));
    } else {
      EXPECT_THAT(log.text(), IsEmpty());
    }
  }
}

TEST_F(OffloadScopes, AScopeOnTheCpuSaysThatItOffloadsNothingAlsoAfterReserveAndAfterGoodSteps) {
  const at::Tensor carrier = NewCarrier();
  const at::Tensor on_host = at::ones({kSide, kSide}).requires_grad_();
  std::vector<at::Tensor> seen;
  for (const bool reserves : {true, false}) {
    SCOPED_TRACE(reserves ? "after Reserve" : "after a good step");
    const auto session = world_.NewSession(SmallWindows());
    const CapturedLog log;
    if (reserves) {
      ASSERT_THAT(session->Reserve(0, kMiB), IsOk());
    } else {
      const OffloadScope scope(session);
      ObserveOne(carrier, carrier, 1, &seen);
    }
    EXPECT_THAT(log.text(), IsEmpty());
    {
      const OffloadScope scope(session);
      on_host.sin().sum();
    }
    EXPECT_THAT(log.text(), HasSubstr("saved no strided tensor on "));
  }
}

TEST_F(OffloadScopes, AScopeThatSavesANumberOrAlsoATensorOfTheCpuSaysNothing) {
  const at::Tensor carrier = NewCarrier();
  const at::Tensor on_host = at::ones({kSide, kSide}).requires_grad_();
  std::vector<at::Tensor> seen;
  const CapturedLog log;
  {
    const OffloadScope scope(world_.session());
    carrier.mul(at::scalar_tensor(2));
  }
  EXPECT_EQ(stats().kept_unsupported, 1u) << "the test's premise: a number is a tensor on the CPU";
  {
    const OffloadScope scope(world_.session());
    on_host.sin().sum();
    ObserveOne(carrier, carrier, 1, &seen);
  }
  EXPECT_THAT(log.text(), IsEmpty());
}

TEST_F(OffloadScopes, AScopeThatEndsOnAnotherThreadIsToldOfByNameAndPacksNothingFromThenOn) {
  std::vector<at::Tensor> seen_inside;
  std::vector<at::Tensor> seen_behind;
  at::Tensor y = carrier_;
  std::optional<OffloadScope> scope(std::in_place, world_.session());
  y = ObserveOne(y, carrier_, 1, &seen_inside);
  {
    const CapturedLog log;
    std::thread([&] { scope.reset(); }).join();
    EXPECT_THAT(log.text(), HasSubstr("OffloadScope has ended on another thread"));
  }
  y = ObserveOne(y, carrier_, 2, &seen_behind);
  EXPECT_EQ(stats().packed, 1u);
  EXPECT_EQ(stats().offloaded, 1u);
  EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr);
  y.backward();
  EXPECT_TRUE(SameBytes(seen_inside.at(0), ActivationValues({kSide, kSide}, 1)));
  EXPECT_TRUE(SameBytes(seen_behind.at(0), ActivationValues({kSide, kSide}, 2)));
}

// A scope follows the thread state: at::launch and fork/join pass it on.
TEST_F(OffloadScopes, WhatOneThreadSavesIsNotReadWhenAnotherThreadSavesInTheSameScope) {
  const at::Tensor other_carrier = NewCarrier();
  std::vector<at::Tensor> other_seen;
  at::Tensor y;
  {
    const OffloadScope scope(world_.session());
    at::Tensor noise = activation({kSide, kSide}, 1);
    y = Observe(carrier_, {noise}, &seen_);
    std::thread([&, state = at::ThreadLocalState()] {
      const at::ThreadLocalStateGuard guard(state);
      at::Tensor other = other_carrier;
      for (int i = 0; i < 4; ++i) other = ObserveOne(other, other_carrier, i, &other_seen);
    }).join();
    EXPECT_EQ(stats().offloaded, 5u) << "the test's premise";
    noise.variable_data().copy_(ActivationValues({kSide, kSide}, 7));  // the operator continues
  }
  y.backward();
  EXPECT_TRUE(SameBytes(seen_.at(0), ActivationValues({kSide, kSide}, 7)));
}

TEST_F(OffloadScopes, TheScopeOfOneThreadDoesNotCutThePrefetchOfAnother) {
  constexpr int kTensors = 12;
  std::vector<at::Tensor> other_seen;
  std::vector<at::Tensor> others;
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    for (int i = 0; i < kTensors; ++i) {
      y = ObserveOne(y, carrier_, i, &seen_);
      std::thread([&] {
        const at::Tensor other_carrier = NewCarrier();
        const OffloadScope other_scope(world_.session());
        others.push_back(ObserveOne(other_carrier, other_carrier, 100 + i, &other_seen));
      }).join();
    }
  });
  y.backward();
  EXPECT_LT(stats().fetched_on_demand, 3u) << stats().ToString();
  EXPECT_GT(stats().prefetch_hits, kTensors - 4u);
  EXPECT_TRUE(SameBytes(seen_.at(0), ActivationValues({kSide, kSide}, 0)));
}

// Too large to share a copy.
constexpr int64_t kLargeSide = 128;
constexpr uint64_t kLargeBytes = kLargeSide * kLargeSide * 4;

TEST_F(OffloadScopes, ABackwardThatGoesToAndFroBetweenScopesFetchesEachTensorOnce) {
  constexpr int kTensors = 6;
  const auto session = world_.NewSession(Windows(1, kMiB));
  const at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
    for (int i = 0; i < kTensors; ++i) {
      y = Observe(y, {activation({kLargeSide, kLargeSide}, i)}, &seen_);
      std::thread([&] {
        const OffloadScope other_scope(session);
        y = Observe(y, {activation({kLargeSide, kLargeSide}, 100 + i)}, &seen_);
      }).join();
    }
  });
  y.backward();
  EXPECT_EQ(session->GetStats().fetched_bytes, 2 * kTensors * kLargeBytes);
  EXPECT_EQ(session->GetStats().prefetch_hits, kTensors - 1u);
}

TEST_F(OffloadScopes, WhatANodeHasReadIsNotFetchedAheadForTheNextThingThatItReads) {
  const auto session = world_.NewSession(Windows(1, kMiB));
  const auto large = [&](int first) { return activation({kLargeSide, kLargeSide}, first); };
  at::Tensor other = large(2);
  at::Tensor y = InScope(session, [&] { return Observe(carrier_, {other}, &seen_); });
  {
    const OffloadScope scope(session);
    y = Observe(y, {large(1), std::exchange(other, at::Tensor()), large(3)}, &seen_);
  }
  y.backward();
  EXPECT_EQ(session->GetStats().shared, 1u) << "the test's premise";
  EXPECT_EQ(session->GetStats().fetched_bytes, 3 * kLargeBytes);
}

}  // namespace offload_scopes_test
}  // namespace pinion::testing
