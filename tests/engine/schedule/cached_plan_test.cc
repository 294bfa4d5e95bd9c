#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/plan_cache.h"
#include "pinion/tests/engine/planner/small_steps.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace cached_plan_test {

using ::pinion::testing::ForwardAndBackward;
using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::ElementsAre;

StepTrace Chain(const std::vector<uint64_t>& signatures) {
  return ForwardAndBackward(/*size_bytes=*/100, signatures);
}

CachedPlan Cached(const StepTrace& step, const std::vector<StepMove>& moves = {}) {
  return CachedPlan(step, StepPlan{.moves = moves});
}

// --- What is saved ---

TEST(CachedPlan, ObjectsOfOneSignatureAreFoundInTheirOrderAndNoMoreThanTheStepSaves) {
  const CachedPlan cached = Cached(Chain({7, 8, 7, 7}));
  EXPECT_EQ(cached.Find(7, /*before=*/0), 0u);
  EXPECT_EQ(cached.Find(7, /*before=*/1), 2u);
  EXPECT_EQ(cached.Find(7, /*before=*/2), 3u);
  EXPECT_EQ(cached.Find(7, /*before=*/3), std::nullopt);
  EXPECT_EQ(cached.Find(8, /*before=*/0), 1u);
  EXPECT_EQ(cached.Find(8, /*before=*/1), std::nullopt);
  EXPECT_EQ(cached.Find(9, /*before=*/0), std::nullopt);
}

// --- When it is used ---

TEST(CachedPlan, UsesOfAnObjectAreCountedFromItsFirstToItsLast) {
  const CachedPlan cached = Cached(Chain({7, 8, 9}));
  EXPECT_EQ(cached.AccessIndex(/*object=*/1, /*n=*/0), 1u);
  EXPECT_EQ(cached.AccessIndex(/*object=*/1, /*n=*/1), 4u);
  EXPECT_EQ(cached.AccessIndex(/*object=*/0, /*n=*/2), 5u) << "more than the step has";
  EXPECT_EQ(cached.AccessIndex(/*object=*/2, /*n=*/9), 3u);
}

// --- What its plan does ---

// Uses 0 to 2 save, 3 to 5 read in reverse.
TEST(CachedPlan, AnObjectIsHereUntilItsNextUseUnlessItComesBackForIt) {
  const CachedPlan cached =
      Cached(Chain({7, 8, 9}), {{.object = 1, .evict_at = 2, .fetch_at = 3, .read_at = 4}});
  EXPECT_FALSE(cached.Moves(0));
  EXPECT_TRUE(cached.Moves(1));
  EXPECT_FALSE(cached.Moves(2));
  EXPECT_TRUE(cached.IsResidentUntilNextAccess(/*object=*/0, /*now=*/0));
  EXPECT_TRUE(cached.IsResidentUntilNextAccess(/*object=*/0, /*now=*/4));
  EXPECT_FALSE(cached.IsResidentUntilNextAccess(/*object=*/0, /*now=*/5)) << "there is none";
  EXPECT_FALSE(cached.IsResidentUntilNextAccess(/*object=*/1, /*now=*/1));
  EXPECT_FALSE(cached.IsResidentUntilNextAccess(/*object=*/1, /*now=*/4));
}

TEST(CachedPlan, DropsComeInTheOrderOfTheirUses) {
  const CachedPlan cached =
      Cached(Chain({7, 8, 9, 9}), {{.object = 2, .evict_at = 3, .fetch_at = 4, .read_at = 5},
                                   {.object = 1, .evict_at = 2, .fetch_at = 5, .read_at = 6},
                                   {.object = 0, .evict_at = 1, .fetch_at = 5, .read_at = 7}});
  EXPECT_THAT(cached.evictions(), ElementsAre(2, 1, 0));
}

TEST(CachedPlan, DropsOfOneUseComeInTheOrderOfTheMoves) {
  std::vector<StepMove> moves;
  for (uint32_t object = 20; object-- > 0;) {
    moves.push_back({.object = object, .evict_at = object < 10 ? 19u : 25u});
  }
  const CachedPlan cached = Cached(Chain(std::vector<uint64_t>(20, 7)), moves);
  EXPECT_THAT(cached.evictions(), ElementsAre(10, 11, 12, 13, 14, 15, 16, 17, 18, 19,  //
                                              0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
}

TEST(CachedPlan, CopiesThatWaitComeInTheOrderInWhichTheyGo) {
  const CachedPlan cached = Cached(
      Chain({1, 2, 3, 4}), {{.object = 0, .evict_at = 5, .fetch_at = 6, .read_at = 7, .copy_at = 3},
                            {.object = 1, .evict_at = 4, .fetch_at = 5, .read_at = 6, .copy_at = 3},
                            {.object = 2, .evict_at = 3, .fetch_at = 4, .read_at = 5}});
  EXPECT_THAT(cached.deferred_copies(), ElementsAre(1, 0));
  EXPECT_TRUE(cached.Stays(0, /*now=*/2));
  EXPECT_FALSE(cached.Stays(0, /*now=*/3));
  EXPECT_FALSE(cached.Stays(2, /*now=*/2)) << "it does not wait";
  EXPECT_TRUE(cached.Stays(3, /*now=*/7)) << "it does not move";
}

TEST(CachedPlan, AShortfallIsWhatItWasGiven) {
  EXPECT_THAT(CachedPlan(Chain({7}), StepPlan()).shortfall(), IsOk());
  EXPECT_THAT(CachedPlan(Chain({7}), StepPlan(), absl::ResourceExhaustedError("no")).shortfall(),
              StatusIs(absl::StatusCode::kResourceExhausted));
}

// --- What comes until the next use ---

TEST(CachedPlan, WhatTheNextIntervalHasMoreAtItsPeakIsGrowth) {
  const struct {
    const char* name;
    StepInterval before;
    StepInterval next;
    uint64_t growth_bytes;
  } rows[] = {
      {"other bytes grow", {.other_bytes = 30}, {.other_bytes = 45}, 15},
      {"transient bytes grow on top",
       {.other_bytes = 30},
       {.other_bytes = 10, .transient_bytes = 45},
       25},
      {"transient bytes of the interval before are there no more",
       {.other_bytes = 30, .transient_bytes = 1000},
       {.other_bytes = 45},
       15},
      {"what is freed until the next use is no growth",
       {.other_bytes = 500},
       {.other_bytes = 100, .transient_bytes = 300},
       0},
  };
  for (const auto& row : rows) {
    StepTrace step = Chain({7});
    step.intervals[1] = row.before;
    step.intervals[2] = row.next;
    EXPECT_EQ(Cached(step).GrowthBytes(1), row.growth_bytes) << row.name;
  }
}

TEST(CachedPlan, OfTwoRecordsTheOneCountsInWhichMemoryGrowsMore) {
  StepTrace step = Chain({7});
  step.intervals[1] = {.other_bytes = 50};
  step.intervals[2] = {.other_bytes = 140};
  StepTrace before = Chain({7});
  before.intervals[1] = {.other_bytes = 100};
  before.intervals[2] = {.other_bytes = 100, .transient_bytes = 50};
  step.TakeMostOf(before);
  EXPECT_EQ(Cached(step).GrowthBytes(1), 90u) << "from 50 to 140, and not from 100 to 150";
}

TEST(CachedPlan, AnObjectThatIsMadeNextIsGrowth) {
  StepTrace step = Chain({7, 8});
  step.objects[1].size_bytes = 200;
  step.intervals[1].other_bytes = 5;
  const CachedPlan cached = Cached(step);
  EXPECT_EQ(cached.GrowthBytes(0), 205u);
  EXPECT_EQ(cached.GrowthBytes(1), 0u) << "what is read next is there, or fetched by the plan";
}

TEST(CachedPlan, WhatIsMadeNextAndFreesNothingIsAmongTheOtherBytesAlready) {
  StepTrace step = Chain({7, 8});
  step.objects[1].frees = false;
  for (const size_t i : {1, 2, 3}) step.intervals[i].other_bytes = 100;
  EXPECT_EQ(Cached(step).GrowthBytes(0), 100u);
}

TEST(CachedPlan, TellsPeopleThatItAddsToGradients) {
  StepTrace step = Chain({7, 8});
  EXPECT_EQ(Cached(step).note(), "");
  step.begins_with_gradients = true;
  EXPECT_EQ(Cached(step).note(), "adds to gradients");
  EXPECT_EQ(CachedPlan(step, StepPlan(), absl::ResourceExhaustedError("too little")).note(),
            "adds to gradients; not run as planned: too little");
}

TEST(CachedPlan, WhatIsMoreThanItsRecordBeganWithCountsTheFirstObjectOnce) {
  StepTrace step = Chain({7, 8});
  step.intervals[0].other_bytes = 1000;
  EXPECT_EQ(Cached(step).ExcessBytes(1150), 50u);
  EXPECT_EQ(Cached(step).ExcessBytes(900), 0u);
  step.objects[0].frees = false;
  EXPECT_EQ(Cached(step).ExcessBytes(1150), 150u) << "it is among the other bytes";
}

TEST(CachedPlan, ItRunsWhereItsPeakFitsBesideWhatTheStepBeginsWith) {
  StepTrace step = Chain({7, 8});
  step.intervals[0].other_bytes = 1000;  // and the first object's 100
  StepPlan plan;
  plan.peak_bytes = 1300;
  const CachedPlan cached(step, plan, absl::OkStatus(), {}, /*memory_bytes=*/1320);
  EXPECT_TRUE(cached.CanRunWith(1120));
  EXPECT_FALSE(cached.CanRunWith(1121));
  const CachedPlan lacks(step, plan, absl::ResourceExhaustedError("20 bytes"), {},
                         /*memory_bytes=*/1280);
  EXPECT_FALSE(lacks.FitsWith(1081));
  EXPECT_TRUE(lacks.FitsWith(1080)) << "a step that begins with less may fit";
  EXPECT_FALSE(lacks.CanRunWith(1080)) << "and has no plan yet";
  EXPECT_TRUE(Cached(step).CanRunWith(UINT64_MAX)) << "there is no target";
}

TEST(CachedPlan, TheMostGrowthIsThatOfAnyUse) {
  StepTrace step = Chain({7, 8});
  step.intervals[2].transient_bytes = 40;
  step.intervals[4].transient_bytes = 30;
  EXPECT_EQ(Cached(step).MostGrowthBytes(), 100u) << "object 8 is made";
  step.intervals[3].transient_bytes = 300;
  EXPECT_EQ(Cached(step).MostGrowthBytes(), 300u);
}

TEST(CachedPlan, WhileAStepOnlySavesTheMostSoFarIsKnown) {
  StepTrace step = Chain({7, 8});
  step.objects[0].saved_until = 2;  // accesses: 7 8 7 | 8 7
  step.accesses = {0, 1, 0, 1, 0};
  step.intervals.resize(6);
  step.intervals[0].transient_bytes = 900;  // before the first save
  step.intervals[1].transient_bytes = 300;
  step.intervals[2].transient_bytes = 200;
  step.intervals[3].transient_bytes = 500;
  step.intervals[4].transient_bytes = 700;
  const CachedPlan cached = Cached(step);
  const uint64_t size_bytes = step.objects[1].size_bytes;
  EXPECT_EQ(cached.SaveGrowthBytes(0), 300u + size_bytes);
  EXPECT_EQ(cached.SaveGrowthBytes(1), 300u + size_bytes);
  EXPECT_EQ(cached.SaveGrowthBytes(2), 500u);
  EXPECT_EQ(cached.SaveGrowthBytes(3), 0u) << "a read";
  EXPECT_EQ(cached.SaveGrowthBytes(4), 0u);
}

TEST(CachedPlan, WhatAStepWasSeenToGrowByIsKnownAndChangesNoPlan) {
  StepTrace step = Chain({7, 8});
  step.intervals[1].transient_bytes = 300;
  const CachedPlan cached = Cached(step);
  const auto grown =
      cached.WithGrowths({{.access = 1, .size_bytes = 700}, {.access = 0, .size_bytes = 1}});
  EXPECT_EQ(grown->GrowthBytes(0), cached.GrowthBytes(0)) << "more was known";
  EXPECT_EQ(grown->GrowthBytes(1), 700u);
  EXPECT_EQ(grown->MostGrowthBytes(), 700u);
  EXPECT_EQ(grown->SaveGrowthBytes(0), cached.SaveGrowthBytes(0));
  EXPECT_EQ(grown->SaveGrowthBytes(1), 700u);
  EXPECT_EQ(grown->step().intervals[2].peak_other_bytes(),
            cached.step().intervals[2].peak_other_bytes());
  PlanCache cache;
  cache.Learn(grown);
  for (int step = 0; step < 3; ++step) cache.Learn(std::make_shared<const CachedPlan>(cached));
  cache.Learn(cache.all().front()->WithGrowths({{.access = 1, .size_bytes = 600}}));
  ASSERT_EQ(cache.all().size(), 1u);
  EXPECT_EQ(cache.all().front()->GrowthBytes(1), 700u) << "also of a new record";
  EXPECT_EQ(cache.all().front()->SeenGrowths().size(), 2u) << "one for each access";
}

TEST(CachedPlan, RoomThatIsLeftIsGrowthAlsoBesideLaterRecords) {
  StepTrace before = Chain({7, 8});
  before.LeaveRoom({.access = 1, .size_bytes = 600});
  StepTrace step = Chain({7, 8});
  step.TakeMostOf(before);
  StepTrace last = Chain({7, 8});
  last.TakeMostOf(step);
  for (const StepTrace& one : {before, step, last, last.WithMore(5000)}) {
    EXPECT_EQ(Cached(one).GrowthBytes(1), 600u);
    EXPECT_EQ(Cached(one).GrowthBytes(2), Cached(Chain({7, 8})).GrowthBytes(2));
    EXPECT_EQ(Cached(one).MostGrowthBytes(), 600u);
  }
}

TEST(CachedPlan, AReadOfABackwardThatMakesAGraphIsAnotherThanOneThatDoesNot) {
  StepTrace step = Chain({7, 8});
  for (StepObject& object : step.objects) object.needed_until = 4;
  StepTrace makes_graph = step;
  makes_graph.graph_reads = {2, 3};
  const CachedPlan plain = Cached(step), other = Cached(makes_graph);
  EXPECT_EQ(plain.NextRead(1, /*now=*/1, AccessKind::kReadAndKept), 2u);
  EXPECT_EQ(plain.NextRead(1, /*now=*/1, AccessKind::kReadIntoGraph), std::nullopt);
  EXPECT_EQ(other.NextRead(1, /*now=*/1, AccessKind::kReadIntoGraph), 2u);
  EXPECT_EQ(other.NextRead(1, /*now=*/1, AccessKind::kReadAndKept), std::nullopt);
  EXPECT_FALSE(plain.IsLike(makes_graph));
  EXPECT_TRUE(other.IsLike(makes_graph));
}

TEST(CachedPlan, WhatNeedsMemoryOfItsOwnTravelsAlone) {
  StepTrace step = Chain({7, 7, 7});
  for (StepObject& object : step.objects) object.needed_until = 6;
  step.operators = {0, 1, 2, 3, 4, 4};
  for (const bool comes_alone : {false, true}) {
    SCOPED_TRACE(comes_alone ? "memory of its own" : "shared memory");
    step.objects[1].comes_alone = comes_alone;
    const CachedPlan cached =
        Cached(step, {{.object = 0, .evict_at = 2, .fetch_at = 4, .read_at = 5},
                      {.object = 1, .evict_at = 2, .fetch_at = 4, .read_at = 4}});
    EXPECT_EQ(cached.BatchKey(1) == CachedPlan::UniqueBatchKey(1), comes_alone);
    EXPECT_EQ(cached.BatchKey(0) != cached.BatchKey(1), comes_alone);
  }
}

TEST(CachedPlan, WhatIsOffloadedFetchedAndOverAtTheSameAccessesHasOneBatchKey) {
  StepTrace step = Chain({7, 7, 7, 7});
  for (StepObject& object : step.objects) object.needed_until = 8;
  step.operators = {0, 1, 2, 3, 4, 5, 6, 6};  // one operator reads objects 1 and 0
  const auto shares_batch_key_with = [&](const StepMove& other) {
    const CachedPlan cached =
        Cached(step, {{.object = 0, .evict_at = 3, .fetch_at = 5, .read_at = 7}, other});
    EXPECT_EQ(cached.BatchKey(3), 0u) << "it stays";
    return cached.BatchKey(0) == cached.BatchKey(1);
  };
  const StepMove alike = {.object = 1, .evict_at = 3, .fetch_at = 5, .read_at = 6};
  EXPECT_TRUE(shares_batch_key_with(alike));
  EXPECT_FALSE(shares_batch_key_with({.object = 1, .evict_at = 2, .fetch_at = 5, .read_at = 6}));
  EXPECT_FALSE(shares_batch_key_with({.object = 1, .evict_at = 3, .fetch_at = 4, .read_at = 6}));
  EXPECT_FALSE(shares_batch_key_with({.object = 1, .evict_at = 3, .fetch_at = 5, .read_at = 5}))
      << "the parcel would stay until both were read";
  step.objects[0].needed_until = 9;
  EXPECT_FALSE(shares_batch_key_with(alike)) << "the parcel would stay until both are over";
}

// Where nobody has said until when they are needed.
TEST(CachedPlan, WhatIsReadOnceMoreHasAnotherBatchKey) {
  StepTrace step = Chain({7, 7, 7});
  step.accesses.push_back(1);  // 0 1 2 | 2 1 0 1
  step.intervals.emplace_back();
  step.operators = {0, 0, 1, 2, 3, 3, 4};  // one operator makes, and one reads, objects 0 and 1
  const CachedPlan cached =
      Cached(step, {{.object = 0, .evict_at = 2, .fetch_at = 3, .read_at = 5},
                    {.object = 1, .evict_at = 2, .fetch_at = 3, .read_at = 4}});
  EXPECT_NE(cached.BatchKey(0), cached.BatchKey(1));
}

TEST(CachedPlan, WhatLeavesSeveralTimesIsAlone) {
  const CachedPlan cached =
      Cached(Chain({7, 7, 7, 7}),
             {{.object = 0, .evict_at = 3, .fetch_at = 5, .read_at = 5},
              {.object = 1, .evict_at = 3, .fetch_at = 5, .read_at = 5},
              {.object = 0, .evict_at = 6, .fetch_at = 7, .read_at = 7, .copies_out = false}});
  EXPECT_NE(cached.BatchKey(0), cached.BatchKey(1));
  EXPECT_NE(cached.BatchKey(0), 0u);
}

}  // namespace cached_plan_test
}  // namespace pinion
