// Features of TRL's OffloadActivations that no other test covers (tests/peers.md). These are
// windows of tensors, pageable copies, leaves, and the list of live tensors. A tensor may also be
// still on the device when backward reads it.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/hooks/activations/live_tensor.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

// ------------------------------------------------------------- max_fwd_stash_size: in tensors

OffloadOptions TensorWindow(uint64_t tensors) {
  OffloadOptions options = SmallWindows();
  options.eviction_window_bytes = OffloadOptions::kAutoWindow;
  options.eviction_window_tensors = tensors;
  return options;
}

TEST(OffloadTensorWindow, ATensorGoesWhenSoManyWereSavedAfterIt) {
  for (const int window : {1, 2, 5}) {
    SCOPED_TRACE(window);
    OffloadWorld world(TensorWindow(window));
    const std::vector<int64_t> sizes = {64, 32, 128, 64, 256, 64, 64};
    const at::Tensor y = world.Save(sizes);
    ASSERT_EQ(world.stats().offloaded, sizes.size());
    const auto kib = std::accumulate(sizes.begin(), sizes.end() - window, uint64_t{0});
    EXPECT_EQ(world.stats().evicted_bytes, kib * kKiB);
    y.backward();
    EXPECT_EQ(world.QuietStats().reused_on_device, static_cast<uint64_t>(window));
    EXPECT_EQ(world.stats().fetched_bytes, kib * kKiB);
  }
}

// TRL counts tensors that stay, such as small tensors and parameters, too.
TEST(OffloadTensorWindow, TensorsThatAreKeptCountToo) {
  OffloadWorld world(TensorWindow(3));
  const at::Tensor weight = at::ones({64, 64}, at::TensorOptions(world.device()));
  weight.requires_grad_(true);
  const at::Tensor small = Activation(world.carrier, {8});
  at::Tensor y;
  const OffloadScope scope(world.session());
  y = Probe(world.carrier, {world.activation(64)}, OffloadWorld::Use);
  y = Probe(y, {small, weight}, OffloadWorld::Use);
  EXPECT_EQ(world.stats().evicted_bytes, 0u);
  y = Probe(y, {world.activation(32)}, OffloadWorld::Use);
  EXPECT_EQ(world.stats().evicted_bytes, 64 * kKiB) << "it is the third one after the first";
}

// Tensors that share a copy in a window of bytes do not wait for each other in a window of tensors.
TEST(OffloadTensorWindow, SmallTensorsGoAfterSoManyOthersToo) {
  OffloadWorld world(TensorWindow(2));
  const OffloadScope scope(world.session());
  at::Tensor y = world.carrier;
  for (int i = 0; i < 5; ++i) y = Probe(y, {world.activation(2)}, OffloadWorld::Use);
  EXPECT_EQ(world.stats().offloaded, 5u);
  EXPECT_EQ(world.stats().evicted_bytes, 3 * 2 * kKiB);
}

TEST(OffloadTensorWindow, GradientsAreBitwiseTheSame) {
  EmuWorld world(MachineOptions(), TensorWindow(5));
  const TestNet net(world.device(), at::kFloat);
  ExpectSameGradients(TrainStep(net, nullptr), TrainStep(net, world.session()));
  EXPECT_GT(world.session()->GetStats().evicted_bytes, 0u);
  EXPECT_GT(world.session()->GetStats().prefetch_hits, 0u);
}

// TRL raises ValueError for anything below 1.
TEST(OffloadTensorWindow, AWindowOfNoTensorIsRefusedByName) {
  OffloadOptions options;
  options.eviction_window_tensors = 0;
  EXPECT_THAT(options.Validate(), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("eviction_window_tensors is 0")));
  options.eviction_window_tensors = 1;
  EXPECT_THAT(options.Validate(), IsOk());
}

TEST(OffloadTensorWindow, AnotherWindowBesideItIsRefusedByName) {
  OffloadOptions options = TensorWindow(5);
  options.eviction_window_bytes = kMiB;
  EXPECT_THAT(options.Validate(), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("eviction_window_bytes is set as well")));
  options = OffloadOptions();
  options.eviction_window_tensors = 5;
  options.memory_target_bytes = OffloadOptions::kAutoTarget;
  EXPECT_THAT(options.Validate(), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("memory_target_bytes is set as well")));
}

// ----------------------------------------------------------------- use_pin_memory=False: pageable

OffloadOptions Pageable(bool overlap) {
  OffloadOptions options = SmallWindows(1);
  options.overlap = overlap;
  options.allocator.max_locked_bytes = 1;
  options.allocator.pageable_fallback = true;
  return options;
}

TEST(OffloadPageable, NothingIsPinnedAndGradientsAreBitwiseTheSame) {
  for (const bool overlap : {true, false}) {
    SCOPED_TRACE(overlap);
    EmuWorld world(MachineOptions(), Pageable(overlap));
    const TestNet net(world.device(), at::kFloat);
    ExpectSameGradients(TrainStep(net, nullptr), TrainStep(net, world.session()));
    const OffloadStats stats = world.session()->GetStats();
    const AllocatorStats allocator = world.session()->GetAllocatorStats();
    EXPECT_EQ(stats.kept_no_host_memory, 0u);
    EXPECT_GT(stats.evicted_bytes, 0u);
    EXPECT_GT(stats.fetched_bytes, 0u);
    EXPECT_EQ(allocator.locked_bytes.peak, 0u);
    EXPECT_GE(allocator.pageable_bytes.peak, stats.offloaded_bytes / 2);
    EXPECT_EQ(allocator.pageable_allocations, allocator.allocations);
  }
}

TEST(OffloadPageable, ByDefaultEverythingIsPinned) {
  OffloadWorld world(SmallWindows(1));
  world.Save({64, 64}).backward();
  EXPECT_GT(world.session()->GetAllocatorStats().locked_bytes.current, 0u);
  EXPECT_EQ(world.session()->GetAllocatorStats().pageable_allocations, 0u);
}

TEST(OffloadPageable, WithoutAFallbackASessionThatMayPinNothingIsRefused) {
  OffloadOptions options = SmallWindows(1);
  options.allocator.max_locked_bytes = 1;
  EXPECT_THAT(OffloadSession::Create(options, EmuWorld().backend()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("pageable_fallback")));
}

// --------------------------------------------------------------------------------- other leaves

TEST(OffloadLeaves, AreCopiedOnRequestAndFreedIfNobodyHoldsThem) {
  for (const bool copies : {false, true}) {
    OffloadOptions options = SmallWindows(1);
    options.offload_leaves = copies;
    OffloadWorld world(options);
    const auto new_input = [&] { return ActivationValues({64, 64}).to(world.device()); };
    const at::Tensor held = new_input();
    at::Tensor dropped = new_input();
    std::vector<at::Tensor> seen_held;
    std::vector<at::Tensor> seen_dropped;
    const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
      y = Observe(y, {held}, &seen_held);
      y = Observe(y, {dropped}, &seen_dropped);
    });
    dropped.reset();
    EXPECT_EQ(world.stats().offloaded, copies ? 2u : 0u);
    EXPECT_EQ(world.stats().kept_held, copies ? 0u : 2u);
    y.backward();
    EXPECT_TRUE(SameBytes(seen_held[0], held));
    EXPECT_TRUE(SameBytes(seen_dropped[0], held));
    EXPECT_EQ(world.stats().evicted_not_freed > 0, copies) << "the one that is held";
  }
}

// The program references them when they are saved, and releases them before their memory is needed.
// Both recorded and planned steps must evict them.
TEST(OffloadLeaves, WithAMemoryTargetTheyAreCopiedWhateverIsAskedFor) {
  OffloadWorld world(WithTarget(1));
  for (uint64_t step = 1; step <= 4; ++step) {
    std::vector<at::Tensor> seen;
    std::vector<at::Tensor> other_seen;
    at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
      at::Tensor leaf = ActivationValues({64, 64}, 1).to(world.device());
      y = Observe(y, {leaf}, &seen);
      y = Observe(y, {world.activation(32)}, &other_seen);
    });
    y.backward();
    EXPECT_TRUE(SameBytes(seen.at(0), ActivationValues({64, 64}, 1)));
    seen.clear();
    other_seen.clear();
    y.reset();
    EXPECT_EQ(world.QuietStats().offloaded, step * 2);
  }
  EXPECT_NE(world.session()->Explain(0), "") << "the last steps were planned";
  EXPECT_GT(world.stats().fetched_bytes, 0u);
}

// A leaf that requires a gradient is a parameter regardless of the option.
TEST(OffloadLeaves, ParametersStayAllTheSame) {
  OffloadOptions options = SmallWindows(1);
  options.offload_leaves = true;
  OffloadWorld world(options);
  const at::Tensor weight = at::ones({64, 64}, at::TensorOptions(world.device()));
  weight.requires_grad_(true);
  const OffloadScope scope(world.session());
  const at::Tensor y = Probe(world.carrier, {weight}, OffloadWorld::Use);
  EXPECT_EQ(world.stats().kept_parameter, 1u);
}

// ------------------------------------------------- unpack of a tensor that is still on the device

// TRL returns a tensor from its forward stash uncopied. Here the D2H copy's state does not matter.
class OffloadStillThere : public ::testing::Test {
 protected:
  // Two nodes, in a window that holds both tensors.
  at::Tensor Save() {
    at::Tensor y = Observe(world_.carrier, {Activation(world_.carrier, {128, 128}, 1)}, &first_);
    return Observe(y, {Activation(world_.carrier, {128, 128}, 2)}, &second_);
  }
  uint64_t submitted() { return world_.session()->GetEngineStats(0).d2h.submitted_transfers; }
  uint64_t completed() { return world_.session()->GetEngineStats(0).d2h.completed_transfers; }
  void ExpectUsedAsTheyAre(const at::Tensor& y) {
    y.backward();
    EXPECT_EQ(world_.stats().reused_on_device, 2u);
    EXPECT_EQ(world_.stats().fetched_bytes, 0u);
    EXPECT_EQ(world_.session()->GetEngineStats(0).h2d.submitted_transfers, 0u);
    EXPECT_TRUE(SameBytes(first_[0], ActivationValues({128, 128}, 1)));
    EXPECT_TRUE(SameBytes(second_[0], ActivationValues({128, 128}, 2)));
  }

  OffloadWorld world_{SmallWindows(kMiB), SlowCopies()};
  std::vector<at::Tensor> first_;
  std::vector<at::Tensor> second_;
};

TEST_F(OffloadStillThere, BeforeItsCopyWasSubmittedItIsUsedAsItIs) {
  const OffloadScope scope(world_.session());
  const at::Tensor y = Save();
  ASSERT_LE(submitted(), 1u) << "the second one's operator may still run";
  ExpectUsedAsTheyAre(y);
}

TEST_F(OffloadStillThere, WhileItsCopyIsQueuedOrRunsItIsUsedAsItIs) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "needs copies that are stuck";
  const at::Tensor y = InScope(world_.session(), [&] { return Save(); });
  ASSERT_GE(submitted(), 1u);
  ASSERT_EQ(completed(), 0u);
  ExpectUsedAsTheyAre(y);
}

TEST_F(OffloadStillThere, OnceItsCopyIsDoneItIsUsedAsItIs) {
  const at::Tensor y = InScope(world_.session(), [&] { return Save(); });
  ASSERT_THAT(world_.Synchronize(), IsOk());
  ASSERT_EQ(completed(), submitted());
  ASSERT_GT(completed(), 0u);
  ExpectUsedAsTheyAre(y);
}

// ----------------------------------------------------------------------- who holds what, by whom

TEST(OffloadLiveTensors, EachIsListedWithItsMakerItsScopeAndItsPlace) {
  OffloadWorld world(SmallWindows(64 * kKiB));
  at::Tensor old = InScope(world.session(), world.carrier, [&](at::Tensor& old) {
    at::Tensor shared = at::relu(world.activation(64));
    old = Probe(old, {shared, shared.view({-1, 32})}, OffloadWorld::Use);
    shared.reset();
    old = Probe(old, {world.activation(32)}, OffloadWorld::Use);
  });
  {
    const OffloadScope scope(world.session());
    Probe(world.carrier, {world.activation(64)}, OffloadWorld::Use);  // its graph is dropped
    old = Probe(old, {world.activation(40)}, OffloadWorld::Use);
  }
  const std::vector<LiveTensor> live = world.session()->LiveTensors();
  ASSERT_THAT(live, SizeIs(3));
  EXPECT_EQ(live[0].tensor, "Float [16384]");
  EXPECT_EQ(live[0].made_by, "ReluBackward0");
  EXPECT_EQ(live[0].size_bytes, 64 * kKiB);
  EXPECT_EQ(live[0].saved_tensors, 3) << "relu saves its result as well";
  EXPECT_EQ(live[0].scopes_ago, 1u);
  EXPECT_FALSE(live[0].on_device);
  EXPECT_TRUE(live[0].in_host_memory);
  EXPECT_EQ(live[1].made_by, "AddBackward0");
  EXPECT_EQ(live[1].scope, live[0].scope);
  EXPECT_GT(live[1].node, live[0].node);
  EXPECT_EQ(live[2].scopes_ago, 0u);
  EXPECT_EQ(live[2].scope, live[0].scope + 1);
  EXPECT_TRUE(live[2].on_device);
  const std::string text = ToString(live);
  EXPECT_THAT(text, HasSubstr("Float [16384], 64 KiB, made by ReluBackward0, saved by node "));
  EXPECT_THAT(text, HasSubstr("(opened since: 1) on device 0, held 3 times, in host memory"));
  EXPECT_THAT(text, HasSubstr("on both sides"));

  old.backward();
  old.reset();
  EXPECT_TRUE(Soon([&] { return world.session()->LiveTensors().empty(); }));
  EXPECT_EQ(ToString({}), "");
}

TEST(OffloadLiveTensors, ALeafHasNoMakerAndWhatWaitsIsOnTheDeviceAlone) {
  OffloadOptions options = SmallWindows(kMiB);
  options.offload_leaves = true;
  OffloadWorld world(options);
  const OffloadScope scope(world.session());
  const at::Tensor leaf = ActivationValues({64, 64}).to(world.device());
  const at::Tensor y = Probe(world.carrier, {leaf}, OffloadWorld::Use);
  const std::vector<LiveTensor> live = world.session()->LiveTensors();
  ASSERT_THAT(live, SizeIs(1));
  EXPECT_EQ(live[0].made_by, "");
  EXPECT_TRUE(live[0].on_device);
  EXPECT_FALSE(live[0].in_host_memory);
  EXPECT_THAT(ToString(live), HasSubstr("a leaf, saved by node"));
  EXPECT_THAT(ToString(live), HasSubstr("held 1 time, "));
  EXPECT_THAT(ToString(live), HasSubstr("on the device\n"));
}

// Scopes tell the tensors of two graphs apart. TRL forgets a graph's tensors at the next step, and
// restarts its numbers at 1.
TEST(OffloadLiveTensors, AGraphThatIsNeverReadIsFoundByItsScope) {
  OffloadWorld world(SmallWindows(1));
  const at::Tensor forgotten = world.Save({64});
  for (int step = 0; step < 3; ++step) world.Save({32, 32}).backward();
  ASSERT_TRUE(Soon([&] { return world.stats().live_handles == 1; }));
  const std::vector<LiveTensor> live = world.session()->LiveTensors();
  ASSERT_THAT(live, SizeIs(1));
  EXPECT_EQ(live[0].scopes_ago, 3u);
  EXPECT_EQ(live[0].size_bytes, 64 * kKiB);
}

TEST(OffloadLiveTensors, ASessionThatIsSwitchedOffHasNone) {
  OffloadOptions options = SmallWindows(1);
  options.enabled = false;
  OffloadWorld world(options);
  const at::Tensor y = world.Save({64});
  EXPECT_THAT(world.session()->LiveTensors(), SizeIs(0));
}

}  // namespace
}  // namespace pinion::testing
