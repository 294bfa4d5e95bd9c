// Checks when a tensor planned as resident is offloaded after all: when no operator can write it.

#include "pinion/hooks/activations/deferred_offloads.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "gtest/gtest.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/plan_cache.h"
#include "pinion/engine/schedule/planned_schedule.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_state.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/activations/offload_stats_recorder.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/activations/tensor_departures.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/saved_version.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/plan/parameter_cast.h"
#include "pinion/hooks/tier/torch_tier.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace deferred_offloads_test {

constexpr ScopeId kFirstScope = 1;
constexpr ScopeId kSecondScope = 2;
constexpr uint64_t kSize = 1024;

// Three tensors, of which the first is copied out when the third has been saved.
std::shared_ptr<const CachedPlan> Known() {
  StepTrace step;
  for (const uint64_t signature : {1, 2, 3}) {
    step.objects.push_back({.size_bytes = kSize, .signature = signature});
  }
  step.accesses = {0, 1, 2, 2, 1, 0};
  step.intervals.assign(step.accesses.size() + 1, {.compute_us = 1});
  StepPlan plan;
  plan.moves = {{.object = 0, .evict_at = 3, .fetch_at = 4, .read_at = 5, .copy_at = 2}};
  return std::make_shared<const CachedPlan>(std::move(step), std::move(plan));
}

ChosenSchedule Schedule(uint64_t target_bytes = 100 * kSize) {
  TargetOptions options;
  options.memory_bytes = target_bytes;
  options.link = AssumedLink();
  auto schedule = std::make_unique<PlannedSchedule>(options);
  schedule->Learn(Known());
  PlannedSchedule* target = schedule.get();
  return {.schedule = std::move(schedule), .target = target};
}

NodeId NodeOfAnotherThread() {
  NodeId node;
  std::thread([&node] { node = CurrentNode(); }).join();
  return node;
}

class DeferredOffloadsTest : public ::testing::Test {
 protected:
  // Saves the step's first tensor in the first scope; it stays until the third is saved. The
  // calling thread saves nothing else.
  void SaveFirst() {
    record_ = SaveKept(state_, tensor_, /*signature=*/1);
    OffloadLock lock(state_);
    EXPECT_EQ(Leaving(), 0u);
  }
  RecordPtr SaveKept(OffloadState& state, const at::Tensor& tensor, uint64_t signature) {
    OffloadLock lock(state);
    const BoundStream stream(CurrentStream(world_.device()));
    const auto record = std::make_shared<StorageRecord>(
        tensor.storage(), SavedVersion(tensor), StorageExtent{0, kSize}, stream, kFirstScope,
        ParameterCast::Of(tensor), tensor, other_node_);
    state.books.storages.Add(*record);
    const SaveDecision decision = state.schedule->OnSaved(kFirstScope, {kSize, signature});
    EXPECT_FALSE(decision.leaves);
    record->in_schedule.object = decision.object;
    record->live_handles = 1;
    record->NoteSaver(other_node_, kFirstScope);
    state.books.storages.NoteStays(*record);
    stats_.Update([](OffloadStats& stats) { ++stats.kept_as_planned; });
    return record;
  }
  at::Tensor NewCast() const {
    return at::zeros({kSize / 2}, at::device(world_.device()).dtype(at::kFloat))
        .requires_grad_(true)
        .to(at::kBFloat16);
  }
  // Saves the others on this thread in the second scope, which stays open.
  void SaveTheOthers() {
    OffloadLock lock(state_);
    state_.schedule->OnSaved(kSecondScope, {kSize, /*signature=*/2});
    state_.schedule->OnSaved(kSecondScope, {kSize, /*signature=*/3});
    state_.books.pending.TakeDue(kSecondScope, CurrentNode(), /*batch_bytes=*/0);
  }
  // Returns the number of deferred offloads that are due.
  size_t Leaving() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu, kRecordsLock) {
    Released released;
    DueRecords due;
    TakeDeferredOffloads(state_, stats_, CurrentNode(), due, released);
    return due.records.size();
  }
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu, kRecordsLock) {
    record_->live_handles = 0;
    state_.books.storages.Remove(*record_);
    state_.schedule->OnReleased(record_->in_schedule.object);
  }

  EmuWorld world_;
  at::Tensor tensor_ = at::zeros({kSize / 4}, at::device(world_.device()).dtype(at::kFloat));
  const NodeId other_node_ = NodeOfAnotherThread();
  OffloadStatsRecorder stats_;
  OffloadState state_{Schedule(),
                      PendingTensors(/*largest_small_bytes=*/0, /*batches_tensors=*/false),
                      std::make_shared<DeviceShare>()};
  std::shared_ptr<StorageRecord> record_;
};

TEST_F(DeferredOffloadsTest, WhatWaitsLeavesWhenItsTimeComes) {
  SaveFirst();
  SaveTheOthers();
  OffloadLock lock(state_);
  EXPECT_EQ(Leaving(), 1u);
  EXPECT_EQ(stats_.Get().kept_as_planned, 0u);
  EXPECT_EQ(stats_.Get().offloaded, 1u);
  EXPECT_EQ(Leaving(), 0u) << "once";
}

// The end of a scope means that its operators have returned, on whichever thread.
TEST_F(DeferredOffloadsTest, ThatOperatorsOfAnEndedScopeRanOnAnotherThreadHindersNothing) {
  {
    OffloadLock lock(state_);
    state_.books.pending.TakeDue(kFirstScope, other_node_, /*batch_bytes=*/0);
  }
  SaveFirst();
  {
    OffloadLock lock(state_);
    state_.books.pending.EndScope(kFirstScope);
  }
  SaveTheOthers();
  OffloadLock lock(state_);
  EXPECT_EQ(Leaving(), 1u);
}

TEST_F(DeferredOffloadsTest, WhatAnOpenScopeOfAnotherThreadHasSavedAsWellLeavesWhenThatHasEnded) {
  SaveFirst();
  SaveTheOthers();
  {
    OffloadLock lock(state_);
    record_->NoteSaver(other_node_, kSecondScope);
    EXPECT_EQ(Leaving(), 0u) << "its operator may still write it";
    EXPECT_EQ(Leaving(), 0u);
    EXPECT_EQ(stats_.Get().kept_as_planned, 1u);
    state_.books.pending.EndScope(kSecondScope);
    EXPECT_EQ(Leaving(), 1u);
    EXPECT_EQ(stats_.Get().offloaded, 1u);
    EXPECT_EQ(Leaving(), 0u) << "once";
  }
}

TEST_F(DeferredOffloadsTest, WhatAnOperatorOfItsOpenScopeMayStillWriteLeavesWithThatScope) {
  {
    OffloadLock lock(state_);
    state_.books.pending.TakeDue(kFirstScope, other_node_, /*batch_bytes=*/0);
  }
  SaveFirst();
  SaveTheOthers();
  OffloadLock lock(state_);
  EXPECT_EQ(Leaving(), 0u) << "its operator may still write it";
  EXPECT_EQ(stats_.Get().offloaded, 1u);
  EXPECT_EQ(state_.books.pending.EndScope(kFirstScope).size(), 1u);
}

TEST_F(DeferredOffloadsTest, WhatNobodyNeedsAnyMoreDoesNotLeave) {
  SaveFirst();
  SaveTheOthers();
  OffloadLock lock(state_);
  record_->NoteSaver(other_node_, kSecondScope);
  EXPECT_EQ(Leaving(), 0u);
  Forget();
  state_.books.pending.EndScope(kSecondScope);
  EXPECT_EQ(Leaving(), 0u);
  EXPECT_EQ(stats_.Get().offloaded, 0u);
}

TEST_F(DeferredOffloadsTest, WhatCanBeCastAgainIsLetGoOfWithoutACopy) {
  tensor_ = NewCast();
  SaveFirst();
  SaveTheOthers();
  OffloadLock lock(state_);
  EXPECT_EQ(Leaving(), 0u);
  EXPECT_TRUE(record_->IsCastAgain());
  EXPECT_EQ(stats_.Get().kept_as_planned, 0u);
  EXPECT_EQ(stats_.Get().cast_again, 1u);
  EXPECT_EQ(stats_.Get().offloaded, 0u);
}

TEST_F(DeferredOffloadsTest, AsLongAsWhatIsLetGoOfMakesNoRoomTheNextOneLeavesAsWell) {
  const std::array held_by_the_test = {NewCast(), NewCast()};
  OffloadState state(Schedule(/*target_bytes=*/world_.device_bytes() - 1),
                     PendingTensors(/*largest_small_bytes=*/0, /*batches_tensors=*/false),
                     std::make_shared<DeviceShare>());
  const RecordPtr first = SaveKept(state, held_by_the_test[0], /*signature=*/1);
  const RecordPtr second = SaveKept(state, held_by_the_test[1], /*signature=*/2);
  const c10::Device device = world_.device();
  {
    OffloadLock lock(state);
    state.schedule->OnSaved(kFirstScope, {kSize, /*signature=*/3});
    state.TellDeviceBytes(state.DeviceBytes(device));
  }
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> host,
                              TorchHostTier(SmallTier(), world_.backend(), device.type()));
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<DeviceTier> tier,
                              host->ForDevice(device.index()));
  const OffloadOptions options;
  const LinkCalibration link = AssumedLink();
  TensorDepartures departures(options, link, device, *tier, state, stats_);
  OffloadForTarget(state, stats_, device, CurrentNode(), departures);
  EXPECT_EQ(stats_.Get().cast_again, 2u);
}

}  // namespace deferred_offloads_test
}  // namespace pinion::testing
