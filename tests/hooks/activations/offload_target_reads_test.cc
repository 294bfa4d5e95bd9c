// Checks a memory target with tensors that are read twice and may be evicted in between.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace offload_target_reads_test {

constexpr int64_t kTensorBytes = 256 * kKiB;
constexpr int64_t kTransientBytes = 8 * kTensorBytes;

class OffloadTargetReads : public ::testing::Test {
 protected:
  at::Tensor Ones(int64_t size_bytes) {
    return at::ones({size_bytes / 4}, at::TensorOptions(world_.device()));
  }
  // Saves the tensor; backward reads it and needs `transient_bytes` in addition.
  at::Tensor Node(const at::Tensor& carrier, const at::Tensor& saved, int64_t transient_bytes) {
    return Probe(carrier, {saved},
                 [this, transient_bytes](const at::Tensor& grad, const UnpackSaved& unpack) {
                   const std::vector<at::Tensor> read = unpack();
                   Ones(transient_bytes);
                   seen_.push_back(read.front()[0].to(at::kCPU).item<float>());
                   return grad;
                 });
  }
  at::Tensor activation(int first) { return Activation(carrier_, {kTensorBytes / 4}, first); }
  // Runs a step whose forward is `extend`. Each backward must read the tensors in this order.
  template <typename Extend>
  void RunStep(const std::shared_ptr<OffloadSession>& session, int backwards,
               const std::vector<float>& order, const Extend& extend) {
    at::Tensor y = InScope(session, carrier_, extend);
    for (int after_it = backwards - 1; after_it >= 0; --after_it) {
      seen_.clear();
      y.backward({}, /*retain_graph=*/after_it > 0);
      EXPECT_EQ(seen_, order);
    }
    y.reset();
    EXPECT_THAT(world_.Synchronize(), IsOk());
  }

  EmuWorld world_;
  at::Tensor carrier_ = NewCarrier(world_);
  std::vector<float> seen_;
};

TEST_F(OffloadTargetReads, WhatIsReadTwiceIsAwayBetweenItsReads) {
  OffloadOptions options =
      WithTarget(world_.device_bytes() + kTransientBytes + kTensorBytes + kTensorBytes / 2);
  const std::shared_ptr<OffloadSession> session = world_.NewSession(options);
  // Two nodes read the same tensor; before each, another node needs much memory.
  const auto run_step = [&] {
    RunStep(session, /*backwards=*/1, {3, 1, 2, 1}, [&](at::Tensor& y) {
      at::Tensor twice = activation(1);
      y = Node(y, twice, 16);
      y = Node(y, activation(2), kTransientBytes);
      y = Node(y, std::exchange(twice, at::Tensor()), 16);
      y = Node(y, activation(3), kTransientBytes);
    });
  };
  run_step();
  for (int step = 0; step < 3; ++step) {
    SCOPED_TRACE(step);
    world_.ResetPeak();
    const OffloadStats before = session->GetStats();
    run_step();
    const OffloadStats after = session->GetStats();
    EXPECT_LE(world_.peak_device_bytes(), options.memory_target_bytes);
    EXPECT_EQ(after.offloaded - before.offloaded, 2u) << "it has left once, and so has another";
    EXPECT_EQ(after.fetched_bytes - before.fetched_bytes, 3u * kTensorBytes) << "it came twice";
    EXPECT_EQ(after.prefetches_dropped, before.prefetches_dropped) << "it was read both times";
  }
}

TEST_F(OffloadTargetReads, UnreadPrefetchesThatGiveWayToWhatAStepAllocatesAreCounted) {
  constexpr int kTensors = 8;
  const std::shared_ptr<OffloadSession> session = world_.NewSession(
      WithTarget(world_.device_bytes() + kTensors * kTensorBytes + kTensorBytes / 2));
  at::Tensor more;
  for (const bool allocates_more : {false, false, false, true}) {
    const OffloadStats before = session->GetStats();
    RunStep(session, /*backwards=*/1, {7, 6, 5, 4, 3, 2, 1, 0}, [&](at::Tensor& y) {
      for (int i = 0; i < kTensors; ++i) {
        y = Node(y, activation(i), 16);
        y = Probe(y, {}, [&, i](const at::Tensor& grad, const UnpackSaved&) {
          if (i == 5 && allocates_more) more = Ones(5 * kTensorBytes);
          if (i == 3) more.reset();
          return grad;
        });
      }
      Ones(3 * kTensorBytes);
    });
    const OffloadStats after = session->GetStats();
    const uint64_t dropped = after.prefetches_dropped - before.prefetches_dropped;
    if (allocates_more) {
      EXPECT_GT(dropped, 0u);
      EXPECT_LE(dropped, 3u);
    } else {
      EXPECT_EQ(dropped, 0u);
    }
  }
}

TEST_F(OffloadTargetReads, ACastThatIsComputedAgainIsGivenRoomAndOneThatTheProgramHasNeedsNone) {
  for (const bool is_held : {false, true}) {
    SCOPED_TRACE(is_held);
    const at::Tensor weight =
        at::ones({kTensorBytes / 2}, at::TensorOptions(world_.device())).requires_grad_(true);
    const OffloadOptions options =
        WithTarget(world_.device_bytes() + 3 * kTensorBytes + kTensorBytes / 2);
    const std::shared_ptr<OffloadSession> session = world_.NewSession(options);
    for (const bool allocates_more : {false, false, false, false, true}) {
      at::Tensor held, more;
      const at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
        y = Node(y, activation(1), 16);
        at::Tensor cast = weight.to(at::kBFloat16);
        y = Node(y, cast, 16);
        if (allocates_more && is_held) held = cast;
        cast.reset();
        // The first activation is prefetched by then. With `more` or `held`, half a tensor is free.
        y = Probe(y, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
          EXPECT_THAT(world_.Synchronize(), IsOk());
          world_.ResetPeak();
          if (allocates_more) more = Ones((is_held ? 1 : 2) * kTensorBytes);
          return grad;
        });
        y = Node(y, activation(2), 16);
        Ones(2 * kTensorBytes);
      });
      EXPECT_THAT(world_.Synchronize(), IsOk());
      const OffloadStats before = session->GetStats();
      y.backward();
      const OffloadStats after = session->GetStats();
      const bool needs_room = allocates_more && !is_held;
      EXPECT_EQ(after.prefetches_dropped - before.prefetches_dropped, needs_room ? 1u : 0u);
      EXPECT_LE(world_.peak_device_bytes(), options.memory_target_bytes);
      if (needs_room) {
        EXPECT_EQ(after.recast - before.recast, 1u);
      }
    }
  }
}

TEST_F(OffloadTargetReads, AStepThatSavesOnceMoreWhatItHasLetGoOfIsKnown) {
  const std::shared_ptr<OffloadSession> session =
      world_.NewSession(WithTarget(world_.device_bytes() + 8 * kTensorBytes));
  for (int step = 0; step < 3; ++step) {
    const uint64_t kept_before = session->GetStats().kept_as_planned;
    RunStep(session, /*backwards=*/1, {2, 1}, [&](at::Tensor& y) {
      const at::Tensor first = activation(1);
      y = Node(y, first, 16);
      const at::Tensor twice = activation(2);
      Node(y, twice, 16);  // its last reader
      y = Node(y, twice, 16);
    });
    EXPECT_EQ(session->GetStats().kept_as_planned, kept_before + (step > 0 ? 3 : 0));
  }
}

// Without a retained graph the plan keeps all tensors: each is freed before the next is read.
TEST_F(OffloadTargetReads, AStepThatKeepsItsGraphKeepsWithinTheTargetBehindOneThatDoesNot) {
  OffloadOptions options = WithTarget(world_.device_bytes() + 5 * kTensorBytes + kTensorBytes / 2);
  const std::shared_ptr<OffloadSession> session = world_.NewSession(options);
  for (const int backwards : {1, 1, 2, 2, 1, 2}) {
    SCOPED_TRACE(backwards);
    world_.ResetPeak();
    RunStep(session, backwards, {3, 2, 1, 0}, [&](at::Tensor& y) {
      for (int i = 0; i < 4; ++i) {
        y = Node(y, activation(i), i == 0 ? 4 * kTensorBytes : 16);
      }
    });
    EXPECT_LE(world_.peak_device_bytes(), options.memory_target_bytes);
  }
  EXPECT_GT(session->GetStats().kept_as_planned, 0u);
}

// In a planned step, each offloaded tensor is fetched once for both backwards.
TEST_F(OffloadTargetReads, WhatThePlanHasThereForBothBackwardsIsFetchedOnce) {
  constexpr int kTensors = 8;
  const std::shared_ptr<OffloadSession> session = world_.NewSession(
      WithTarget(world_.device_bytes() + kTensors * kTensorBytes + kTensorBytes / 2));
  OffloadStats before;
  for (int step = 0; step < 8; ++step) {
    before = session->GetStats();
    RunStep(session, /*backwards=*/2, {7, 6, 5, 4, 3, 2, 1, 0}, [&](at::Tensor& y) {
      for (int i = 0; i < kTensors; ++i) {
        y = Node(y, activation(i), 16);
      }
      Ones(3 * kTensorBytes);
    });
  }
  const OffloadStats after = session->GetStats();
  EXPECT_GT(after.evicted_bytes, before.evicted_bytes);
  EXPECT_GT(after.kept_as_planned, before.kept_as_planned);
  EXPECT_EQ(after.fetched_bytes - before.fetched_bytes, after.evicted_bytes - before.evicted_bytes);
}

// As each access of Python's ctx.saved_tensors does.
TEST_F(OffloadTargetReads, ANodeThatReadsTwiceHoldsOneCopy) {
  const std::shared_ptr<OffloadSession> session = world_.NewSession(WithTarget(1));
  at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
    y = Probe(y, {activation(1)}, [this](const at::Tensor& grad, const UnpackSaved& unpack) {
      unpack();
      const uint64_t bytes_with_one = world_.device_bytes();
      world_.ResetPeak();
      unpack();
      EXPECT_EQ(world_.peak_device_bytes(), bytes_with_one);
      return grad;
    });
  });
  y.backward();
  EXPECT_EQ(session->GetStats().fetched_bytes, 2u * kTensorBytes);
}

// A resident tensor also stays until its node is done. A record without the fetched memory would be
// too small for a step that keeps the tensor.
TEST_F(OffloadTargetReads, WhatANodeHasReadOfAGroupIsThereUntilTheNodeIsDone) {
  constexpr int64_t kSmallBytes = 16 * kKiB;
  const std::shared_ptr<OffloadSession> session = world_.NewSession(
      WithTarget(world_.device_bytes() + kTransientBytes + kTensorBytes + kSmallBytes));
  const auto read_both = [this](const at::Tensor& grad, const UnpackSaved& unpack) {
    std::vector<at::Tensor> read = unpack();
    const uint64_t bytes_with_both = world_.device_bytes();
    read.clear();
    EXPECT_EQ(world_.device_bytes(), bytes_with_both);
    return grad;
  };
  OffloadStats before;
  for (int step = 0; step < 4; ++step) {
    before = session->GetStats();
    RunStep(session, /*backwards=*/1, {3}, [&](at::Tensor& y) {
      y = Probe(
          y,
          {Activation(carrier_, {kSmallBytes / 4}, 1), Activation(carrier_, {kSmallBytes / 4}, 2)},
          read_both);
      y = Node(y, activation(3), kTransientBytes);
    });
  }
  const OffloadStats after = session->GetStats();
  EXPECT_EQ(after.fetched_bytes - before.fetched_bytes, 2u * kSmallBytes);
  const uint64_t fetches = after.prefetch_hits + after.fetched_on_demand;
  EXPECT_EQ(fetches - before.prefetch_hits - before.fetched_on_demand, 1u)
      << "a planned step fetches both at once";
}

// For example a checkpoint of the program's own, or an implicit layer.
TEST_F(OffloadTargetReads, WhatANodeHasReadIsThereWhileItRunsABackwardOfItsOwn) {
  const at::Tensor leaf = NewCarrier(world_);
  // Enough for what the inner node reads, and not for what the outer one has read as well.
  const std::shared_ptr<OffloadSession> session = world_.NewSession(
      WithTarget(world_.device_bytes() + kTransientBytes + kTensorBytes + kTensorBytes / 2));
  for (int step = 0; step < 3; ++step) {
    RunStep(session, /*backwards=*/1, {2, 1}, [&](at::Tensor& y) {
      const at::Tensor inner = Node(leaf, activation(2), kTransientBytes);
      y = Probe(y, {activation(1)}, [this, inner](const at::Tensor& grad, const UnpackSaved& read) {
        const std::vector<at::Tensor> outer = read();
        inner.backward();
        seen_.push_back(outer.front()[0].to(at::kCPU).item<float>());
        return grad;
      });
    });
  }
  EXPECT_THAT(session->PlannedSteps(0).front().note, ::testing::HasSubstr("not run as planned"));
}

// The program references the tensor in the first backward. There the second reader deviates from
// the plan, so resident tensors are offloaded between the two reads.
TEST_F(OffloadTargetReads, WhoHasReadInTheBackwardInWhichItLeftReadsAnewInTheNext) {
  const std::shared_ptr<OffloadSession> session =
      world_.NewSession(WithTarget(world_.device_bytes() + 16 * kTensorBytes));
  at::Tensor y;
  at::Tensor held;
  const auto forward = [&] {
    const OffloadScope scope(session);
    held = activation(1);
    y = Node(carrier_, held, 16);
    y = Node(y, held, 16);
  };
  for (int step = 0; step < 5; ++step) {
    forward();
    held.reset();
    y.backward();
    y.reset();
    EXPECT_THAT(world_.Synchronize(), IsOk());
  }
  const OffloadStats before = session->GetStats();
  forward();
  EXPECT_GT(session->GetStats().kept_as_planned, before.kept_as_planned);
  y.backward({}, /*retain_graph=*/true);
  EXPECT_GT(session->GetStats().evicted_bytes, before.evicted_bytes) << "it left late";
  EXPECT_EQ(session->GetStats().fetched_bytes, before.fetched_bytes) << "it was found";
  held.reset();
  seen_.clear();
  y.backward();
  EXPECT_THAT(seen_, ::testing::ElementsAre(1, 1));
  EXPECT_EQ(session->GetStats().fetched_bytes - before.fetched_bytes,
            static_cast<uint64_t>(kTensorBytes))
      << "for both of them";
}

}  // namespace offload_target_reads_test
}  // namespace pinion::testing
