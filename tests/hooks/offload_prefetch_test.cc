// What backward fetches ahead when it does not read what was saved strictly from the last to the
// first.

#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/hooks/offload_options.h"
#include "pinion/hooks/offload_session.h"
#include "pinion/hooks/offload_stats.h"
#include "pinion/tests/hooks/emu_fixture.h"
#include "pinion/tests/hooks/probe.h"

namespace pinion::testing {
namespace {

constexpr uint64_t kTensorBytes = 32 * kKiB;  // each fills a copy of its own

class OffloadPrefetch : public ::testing::Test {
 protected:
  static OffloadOptions Options() {
    OffloadOptions options = SmallWindows(1);  // all that is saved leaves
    options.prefetch_window_bytes = 2 * kTensorBytes;
    return options;
  }
  at::Tensor NewActivation(int first) {
    return Activation(carrier_, {kTensorBytes / sizeof(float)}, first);
  }
  static at::Tensor Use(const at::Tensor& grad, const UnpackSaved& unpack) {
    for (const at::Tensor& saved : unpack()) at::mul(saved, 2);
    return grad;
  }

  EmuWorld world_{MachineOptions(), Options()};
  at::Tensor carrier_ = at::ones({1}, at::TensorOptions(world_.device())).requires_grad_(true);
};

// An attention mask, say, or the target of a loss that is the network's input as well.
TEST_F(OffloadPrefetch, ATensorThatWasSavedFirstAndIsReadFirstDoesNotEndIt) {
  constexpr uint64_t kNodes = 12;
  at::Tensor y = carrier_;
  {
    const OffloadScope scope(world_.session());
    const at::Tensor mask = NewActivation(0);
    y = Probe(y, {mask}, Use);
    for (uint64_t i = 1; i < kNodes; ++i) y = Probe(y, {NewActivation(static_cast<int>(i))}, Use);
    y = Probe(y, {mask}, Use);
  }
  y.backward();
  const OffloadStats stats = world_.QuietStats();
  ASSERT_EQ(stats.offloaded, kNodes);
  ASSERT_EQ(stats.evicted_bytes, kNodes * kTensorBytes);
  EXPECT_EQ(stats.fetched_on_demand, 2u) << "the mask, and what was saved last";
  EXPECT_EQ(stats.prefetch_hits, kNodes - 2u);
  EXPECT_EQ(stats.prefetches_dropped, 0u);
}

TEST_F(OffloadPrefetch, ATensorThatEveryNodeReadsDoesNotEndIt) {
  constexpr uint64_t kNodes = 12;
  at::Tensor y = carrier_;
  {
    const OffloadScope scope(world_.session());
    const at::Tensor mask = NewActivation(0);
    for (uint64_t i = 1; i < kNodes; ++i) {
      y = Probe(y, {mask, NewActivation(static_cast<int>(i))}, Use);
    }
  }
  y.backward();
  const OffloadStats stats = world_.QuietStats();
  ASSERT_EQ(stats.offloaded, kNodes);
  ASSERT_EQ(stats.evicted_bytes, kNodes * kTensorBytes);
  EXPECT_EQ(stats.fetched_on_demand, 2u) << "the mask, and what was saved last";
  EXPECT_EQ(stats.prefetch_hits, kNodes - 2u);
  EXPECT_LE(stats.prefetch_looks, 6 * kNodes);
}

// All of them by one node, which reads them in the order in which it has saved them.
TEST_F(OffloadPrefetch, WhatIsReadFromTheFirstToTheLastIsLookedAtOnce) {
  constexpr uint64_t kTensors = 200;
  at::Tensor y;
  {
    const OffloadScope scope(world_.session());
    std::vector<at::Tensor> saved;
    for (uint64_t i = 0; i < kTensors; ++i) saved.push_back(NewActivation(static_cast<int>(i)));
    y = Probe(carrier_, std::exchange(saved, {}), Use);
  }
  y.backward();
  const OffloadStats stats = world_.QuietStats();
  ASSERT_EQ(stats.evicted_bytes, kTensors * kTensorBytes);
  ASSERT_EQ(stats.fetched_on_demand, kTensors);
  EXPECT_GE(stats.prefetch_looks, kTensors - 1u);
  EXPECT_LE(stats.prefetch_looks, 2 * kTensors);
}

}  // namespace
}  // namespace pinion::testing
