// Checks prefetching when backward does not read strictly from the last saved tensor to the first.

#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>

#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"

namespace pinion::testing {
namespace offload_prefetch_test {

constexpr uint64_t kTensorBytes = 32 * kKiB;  // large enough for a copy of its own

class OffloadPrefetch : public OffloadFixture {
 protected:
  OffloadPrefetch() : OffloadFixture(Windows(1, 2 * kTensorBytes)) {}

  at::Tensor NewActivation(int first) { return activation({kTensorBytes / sizeof(float)}, first); }
  // Saves tensors of `kib` KiB in this order, and reads them in the order `reads`. A second scope,
  // with places of its own, saves them again in that order. Returns the statistics.
  OffloadStats Read(const std::vector<int64_t>& kib, const std::vector<size_t>& reads) {
    std::vector<at::Tensor> saved;
    for (const int64_t size : kib) saved.push_back(Activation(carrier_, {size * 256}));
    at::Tensor y = InScope(world_.session(), [&] {
      return Probe(carrier_, saved,
                   [](const at::Tensor& grad, const UnpackSaved&) { return grad; });
    });
    {
      const OffloadScope scope(world_.session());
      for (auto read = reads.rbegin(); read != reads.rend(); ++read) {
        y = Probe(y, {saved.at(*read)}, Use);
      }
    }
    saved.clear();
    y.backward();
    y.reset();
    return world_.QuietStats();
  }
  static at::Tensor Use(const at::Tensor& grad, const UnpackSaved& unpack) {
    for (const at::Tensor& saved : unpack()) at::mul(saved, 2);
    return grad;
  }
};

// Peers fetch a tensor only when backward reads it (torchtune#1905, torchtitan#2379).
// An attention mask, say, or the target of a loss that is the network's input as well.
TEST_F(OffloadPrefetch, ATensorThatWasSavedFirstAndLastIsFetchedForItsFirstRead) {
  constexpr uint64_t kNodes = 12;
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    const at::Tensor mask = NewActivation(0);
    y = Probe(y, {mask}, Use);
    for (uint64_t i = 1; i < kNodes; ++i) y = Probe(y, {NewActivation(static_cast<int>(i))}, Use);
    y = Probe(y, {mask}, Use);
  });
  y.backward();
  const OffloadStats stats = world_.QuietStats();
  ASSERT_EQ(stats.offloaded, kNodes);
  ASSERT_EQ(stats.evicted_bytes, kNodes * kTensorBytes);
  EXPECT_EQ(stats.fetched_on_demand, 1u) << "the mask, which was saved last";
  EXPECT_EQ(stats.prefetch_hits, kNodes - 1u);
  EXPECT_EQ(stats.prefetches_dropped, 0u);
}

// Saved at the beginning and in the middle; backward first reads it in the middle.
TEST_F(OffloadPrefetch, ATensorThatIsSavedAgainInTheMiddleIsFetchedAheadThere) {
  constexpr uint64_t kNodes = 12;
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    const at::Tensor mask = NewActivation(0);
    y = Probe(y, {mask}, Use);
    for (uint64_t i = 1; i < kNodes; ++i) {
      y = Probe(y, {NewActivation(static_cast<int>(i))}, Use);
      if (i == kNodes / 2) y = Probe(y, {mask}, Use);
    }
  });
  y.backward();
  const OffloadStats stats = world_.QuietStats();
  ASSERT_EQ(stats.evicted_bytes, kNodes * kTensorBytes);
  EXPECT_EQ(stats.fetched_on_demand, 1u) << "what was saved last";
  EXPECT_EQ(stats.prefetch_hits, kNodes - 1u);
}

TEST_F(OffloadPrefetch, ATensorThatEveryNodeReadsDoesNotEndIt) {
  constexpr uint64_t kNodes = 12;
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    const at::Tensor mask = NewActivation(0);
    for (uint64_t i = 1; i < kNodes; ++i) {
      y = Probe(y, {mask, NewActivation(static_cast<int>(i))}, Use);
    }
  });
  y.backward();
  const OffloadStats stats = world_.QuietStats();
  ASSERT_EQ(stats.offloaded, kNodes);
  ASSERT_EQ(stats.evicted_bytes, kNodes * kTensorBytes);
  EXPECT_EQ(stats.fetched_on_demand, 2u) << "the mask, and what was saved last";
  EXPECT_EQ(stats.prefetch_hits, kNodes - 2u);
  EXPECT_LE(stats.prefetch_looks, 6 * kNodes);
}

// One node saves all of them, and reads them in the order of saving.
TEST_F(OffloadPrefetch, WhatIsReadFromTheFirstToTheLastIsLookedAtOnce) {
  constexpr uint64_t kTensors = 200;
  const at::Tensor y = InScope(world_.session(), [&] {
    std::vector<at::Tensor> saved;
    for (uint64_t i = 0; i < kTensors; ++i) saved.push_back(NewActivation(static_cast<int>(i)));
    return Probe(carrier_, std::exchange(saved, {}), Use);
  });
  y.backward();
  const OffloadStats stats = world_.QuietStats();
  ASSERT_EQ(stats.evicted_bytes, kTensors * kTensorBytes);
  ASSERT_EQ(stats.fetched_on_demand, kTensors);
  EXPECT_GE(stats.prefetch_looks, kTensors - 1u);
  EXPECT_LE(stats.prefetch_looks, 2 * kTensors);
}

TEST_F(OffloadPrefetch, AJumpToWhatWasSavedEarlierFetchesAheadWhatFitsThere) {
  // The window cannot hold the third while the fourth is unread.
  const OffloadStats stats = Read({32, 32, 64, 32, 32}, {4, 1, 0, 3, 2});
  ASSERT_EQ(stats.evicted_bytes, 192 * kKiB);
  EXPECT_EQ(stats.fetched_bytes, 192 * kKiB);
  EXPECT_EQ(stats.prefetch_hits, 3u) << "the fourth, the first, and the third";
}

TEST_F(OffloadPrefetch, ATensorFromTheMiddleThatIsReadInBetweenDoesNotEndIt) {
  const OffloadStats stats = Read(std::vector<int64_t>(12, 32), {11, 4, 10, 4, 9, 4, 8, 4, 7, 4, 6,
                                                                 4,  5, 4,  3, 4, 2, 4, 1, 4, 0});
  ASSERT_EQ(stats.evicted_bytes, 12 * kTensorBytes);
  EXPECT_EQ(stats.fetched_on_demand, 2u) << "that one, and what was saved last";
  EXPECT_EQ(stats.prefetch_hits, 10u);
}

TEST_F(OffloadPrefetch, WhatWasSavedLastMayBeReadInBetween) {
  for (const int64_t kib : {32, 64}) {
    SCOPED_TRACE(kib);
    const OffloadStats before = world_.QuietStats();
    const OffloadStats stats =
        Read(std::vector<int64_t>(8, kib), {7, 6, 7, 5, 7, 4, 7, 3, 7, 2, 7, 1, 7, 0});
    EXPECT_EQ(stats.fetched_bytes - before.fetched_bytes, 8 * kib * kKiB);
    EXPECT_EQ(stats.prefetch_hits - before.prefetch_hits, 7u);
    EXPECT_LE(stats.prefetch_looks - before.prefetch_looks, 3u * 8);
  }
}

// The tensors of one scope were saved between those of another.
TEST_F(OffloadPrefetch, AScopeInsideAnotherOnesTimeIsFetchedAheadToo) {
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    y = Probe(y, {NewActivation(1)}, Use);
    std::thread([&] {
      const OffloadScope other(world_.session());
      for (int i = 2; i < 4; ++i) y = Probe(y, {NewActivation(i)}, Use);
    }).join();
    y = Probe(y, {NewActivation(4)}, Use);
  });
  y.backward();
  const OffloadStats stats = world_.QuietStats();
  ASSERT_EQ(stats.evicted_bytes, 4 * kTensorBytes);
  EXPECT_EQ(stats.fetched_on_demand, 2u) << "the last one of each scope";
  EXPECT_EQ(stats.prefetch_hits, 2u);
}

TEST_F(OffloadPrefetch, WhatTheUserHoldsIsNotFetched) {
  std::vector<at::Tensor> held;
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    for (int i = 0; i < 4; ++i) {
      held.push_back(NewActivation(i));
      y = Probe(y, {held.back()}, Use);
    }
  });
  y.backward();
  const OffloadStats stats = world_.QuietStats();
  ASSERT_EQ(stats.evicted_bytes, 4 * kTensorBytes);
  EXPECT_EQ(stats.reused_on_device, 4u);
  EXPECT_EQ(stats.fetched_bytes, 0u);
}

TEST_F(OffloadPrefetch, UnpackingOutsideOfABackwardFetchesAheadToo) {
  std::vector<UnpackSaved> unpacks;
  at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    for (int i = 0; i < 4; ++i) {
      y = Probe(y, {NewActivation(i)}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
        unpacks.push_back(unpack);
        return grad;
      });
    }
  });
  y.backward({}, /*retain_graph=*/true);
  for (const UnpackSaved& unpack : unpacks) unpack();
  y.reset();
  const OffloadStats stats = world_.QuietStats();
  EXPECT_EQ(stats.fetched_on_demand, 1u);
  EXPECT_EQ(stats.prefetch_hits, 3u);
}

}  // namespace offload_prefetch_test
}  // namespace pinion::testing
