#include "pinion/engine/schedule/recompute_trials.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/cached_plan.h"
#include "pinion/engine/schedule/plan_cache.h"
#include "pinion/tests/engine/planner/small_steps.h"

namespace pinion::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using KnownPtr = std::shared_ptr<const CachedPlan>;

// Steps with the same signatures are alike. `again`: by segment; the last one saves the second
// object if it is kept.
KnownPtr Known(const std::vector<uint64_t>& signatures, double step_us,
               const std::vector<bool>& again = {}, std::vector<uint32_t> recompute_set = {},
               absl::Status shortfall = absl::OkStatus()) {
  StepTrace step = ForwardAndBackward(100, signatures);
  for (const bool is_again : again) step.segments.emplace_back().is_recomputed = is_again;
  if (signatures.size() == 2 && !again.empty() && !again.back())
    step.segments.back().accesses = {1, 2};
  return std::make_shared<const CachedPlan>(
      std::move(step), StepPlan{.moves = {}, .peak_bytes = 0, .step_us = step_us},
      std::move(shortfall), std::move(recompute_set));
}

// The same step, which adds to gradients.
KnownPtr WithGradients(const KnownPtr& cached) {
  StepTrace step = cached->step();
  step.begins_with_gradients = true;
  return std::make_shared<const CachedPlan>(std::move(step), cached->plan(), cached->shortfall());
}

std::vector<bool> Kept(RecomputeTrials& choice, int segments) {
  std::vector<bool> kept;
  for (int i = 0; i < segments; ++i) {
    const std::optional<uint32_t> ordinal = choice.OnSegment();
    if (ordinal.has_value()) {
      EXPECT_EQ(*ordinal, static_cast<uint32_t>(i));
    }
    kept.push_back(ordinal.has_value());
  }
  return kept;
}

TEST(RecomputeTrials, AStepThatNobodyKnowsKeepsAll) {
  RecomputeTrials choice;
  choice.OnBegin(/*signature=*/1);
  EXPECT_THAT(Kept(choice, 3), ElementsAre(true, true, true));
  StepTrace step;
  RecomputeTrials::Note(choice.TakeSegmentLog(), step);
  ASSERT_THAT(step.segments, SizeIs(3));
  for (const StepSegment& segment : step.segments) EXPECT_FALSE(segment.is_recomputed);
}

TEST(RecomputeTrials, AKnownStepSaysWhichAreComputedAgain) {
  RecomputeTrials choice;
  choice.OnBegin(/*signature=*/1);
  choice.Follow(Known({1}, 10, {false, true, false}));
  EXPECT_THAT(Kept(choice, 4), ElementsAre(true, false, true, true));
  StepTrace step;
  RecomputeTrials::Note(choice.TakeSegmentLog(), step);
  ASSERT_THAT(step.segments, SizeIs(4));
  EXPECT_TRUE(step.segments[1].is_recomputed);
  EXPECT_FALSE(step.segments[2].is_recomputed);
  choice.OnBegin(/*signature=*/1);
  EXPECT_THAT(Kept(choice, 2), ElementsAre(true, true)) << "the next step follows nobody yet";
}

TEST(RecomputeTrials, WhereTheStepIsLostWhatComesIsKept) {
  RecomputeTrials choice;
  choice.OnBegin(/*signature=*/1);
  choice.Follow(Known({1}, 10, {true, true, true}));
  EXPECT_THAT(Kept(choice, 1), ElementsAre(false));
  choice.Follow(nullptr);
  EXPECT_TRUE(choice.OnSegment().has_value());
}

TEST(RecomputeTrials, OnlyAStepThatHasComputedTheSameAgainFits) {
  RecomputeTrials choice;
  choice.OnBegin(/*signature=*/1);
  choice.Follow(Known({1}, 10, {false, true}));
  EXPECT_TRUE(choice.Fits(*Known({1}, 10, {true, false})));
  Kept(choice, 2);
  EXPECT_TRUE(choice.Fits(*Known({1}, 10, {false, true})));
  EXPECT_TRUE(choice.Fits(*Known({1}, 10, {false, true, true})));
  EXPECT_FALSE(choice.Fits(*Known({1}, 10, {false, false})));
  EXPECT_FALSE(choice.Fits(*Known({1}, 10, {true, true})));
  EXPECT_FALSE(choice.Fits(*Known({1}, 10)));
}

// As Known, with segments 1 and 2 inside of segment 0, and segment 4 inside of segment 3.
KnownPtr Nested(const std::vector<bool>& again, std::vector<uint32_t> recompute_set = {},
                uint32_t early = 0) {
  StepTrace step = Known({1}, 10, again)->step();
  step.segments[1].outer = step.segments[2].outer = 0;
  step.segments[4].outer = 3;
  step.early_segments = early;
  return std::make_shared<const CachedPlan>(std::move(step), StepPlan(), absl::OkStatus(),
                                            std::move(recompute_set));
}

TEST(RecomputeTrials, WhatIsInsideOfASegmentThatIsComputedAgainDoesNotBeginAndKeepsItsOrdinal) {
  RecomputeTrials choice;
  choice.OnBegin(/*signature=*/1);
  choice.Follow(Nested({true, true, true, false, true}));
  EXPECT_EQ(choice.OnSegment(), std::nullopt);
  EXPECT_EQ(choice.OnSegment(), 3u) << "those inside of the first one do not begin";
  EXPECT_EQ(choice.OnSegment(), std::nullopt);
  EXPECT_EQ(choice.OnSegment(), 5u);
  EXPECT_TRUE(choice.Fits(*Nested({true, true, true, false, true})));
  EXPECT_FALSE(choice.Fits(*Nested({false, true, true, false, true})));
  StepTrace step;
  RecomputeTrials::Note(choice.TakeSegmentLog(), step);
  ASSERT_THAT(step.segments, SizeIs(6));
  EXPECT_TRUE(step.segments[2].is_recomputed);
  EXPECT_FALSE(step.segments[3].is_recomputed);
  EXPECT_EQ(step.segments[1].outer, 0u);
  EXPECT_EQ(step.segments[2].outer, 0u);
  EXPECT_EQ(step.segments[4].outer, 3u);
}

TEST(RecomputeTrials, InsideIsAtAnyDepth) {
  StepTrace step = Known({1}, 10, {true, true, true, false})->step();
  step.segments[1].outer = 0;
  step.segments[2].outer = 1;
  RecomputeTrials choice;
  choice.OnBegin(/*signature=*/1);
  choice.Follow(std::make_shared<const CachedPlan>(std::move(step), StepPlan()));
  EXPECT_EQ(choice.OnSegment(), std::nullopt);
  EXPECT_EQ(choice.OnSegment(), 3u);
}

TEST(RecomputeTrials, AMixMayTakeAWholeSegmentOrPartOfOne) {
  for (const bool whole : {true, false}) {
    RecomputeTrials choice;
    choice.OnBegin(/*signature=*/1);
    choice.Try(Nested({false, false, false, false, false}, {whole ? 0u : 1u, 4u}));
    EXPECT_EQ(choice.OnSegment().has_value(), !whole);
    if (!whole) {
      EXPECT_EQ(choice.OnSegment(), std::nullopt);
      EXPECT_EQ(choice.OnSegment(), 2u);
    }
    EXPECT_EQ(choice.OnSegment(), 3u);
    EXPECT_EQ(choice.OnSegment(), std::nullopt);
  }
}

TEST(RecomputeTrials, ThoseThatWouldBeginEarlyInsideOfAnEarlyOneCountAsEarly) {
  RecomputeTrials choice;
  const KnownPtr cached = Nested({true, true, true, false, false}, {}, /*early=*/2);
  EXPECT_EQ(choice.OnEarlySegment(cached, /*is_recorded=*/false, PlanCache()), std::nullopt);
  choice.OnBegin(/*signature=*/1);
  EXPECT_TRUE(choice.Fits(*cached));
  EXPECT_FALSE(choice.Fits(*Nested({true, true, true, false, false}, {}, /*early=*/1)));
  EXPECT_FALSE(choice.Fits(*Nested({true, true, true, false, false}, {}, /*early=*/3)));
}

// What segments 1 and 2, inside of segment 0, save: 200 and 300 bytes; the first one's input has
// 100, and what segment 0 saves besides has 400. `again`: which of them is computed again.
KnownPtr Parts(std::optional<uint32_t> again, double step_us, uint64_t besides = 400) {
  StepTrace step;
  step.segments.resize(3);
  step.segments[1].outer = step.segments[2].outer = 0;
  const auto save = [&step](uint64_t size_bytes, const std::vector<uint32_t>& segments) {
    for (const uint32_t i : segments) {
      step.segments[i].accesses.push_back(static_cast<uint32_t>(step.accesses.size()));
    }
    step.accesses.push_back(static_cast<uint32_t>(step.objects.size()));
    step.objects.push_back({.size_bytes = size_bytes, .signature = size_bytes});
  };
  save(100, {});
  if (again == 0u) {
    for (StepSegment& segment : step.segments) segment.is_recomputed = true;
  } else {
    for (const uint32_t i : {1u, 2u}) {
      step.segments[i].is_recomputed = again == i;
      if (again == i) {
        save(50, {0});  // its input, which nobody else saves
      } else {
        save(100 * uint64_t{i + 1}, {0, i});
      }
    }
    save(besides, {0});
  }
  step.intervals.resize(step.accesses.size() + 1);
  return std::make_shared<const CachedPlan>(
      std::move(step), StepPlan{.moves = {}, .peak_bytes = 0, .step_us = step_us}, absl::OkStatus(),
      std::vector<uint32_t>{again.value_or(1)});
}

TEST(RecomputeTrials, ATrialOfPartOfASegmentWasTheStepIfItSavedTheSameBesides) {
  for (const bool is_same : {true, false}) {
    RecomputeTrials choice;
    PlanCache cached;
    choice.Learn({}, Parts(std::nullopt, 100), cached);
    choice.OnBegin(/*signature=*/1);
    choice.Try(cached.all().front());
    choice.Learn(choice.TakeSegmentLog(), Parts(1, 90, is_same ? 400 : 401), cached);
    EXPECT_EQ(cached.all().front()->plan().step_us, is_same ? 90 : 100);
  }
}

// A step that begins with a segment inside of another one, whose input has 40 bytes and which saves
// 300; `input_bytes`: of the input that is saved first, where it was computed again.
KnownPtr EarlyPart(std::optional<uint64_t> input_bytes, double step_us) {
  StepTrace step = ForwardAndBackward({{.size_bytes = input_bytes.value_or(300), .signature = 7}});
  step.segments.resize(2);
  step.segments[1].outer = 0;
  step.early_segments = 2;
  if (input_bytes.has_value()) {
    step.segments[1].is_recomputed = true;
    step.segments[0].accesses = {0};
  } else {
    step.unsaved_inputs = {{.size_bytes = 40}};
    step.segments[1].inputs = {1};
    step.segments[0].accesses = step.segments[1].accesses = {0, 1};
  }
  return std::make_shared<const CachedPlan>(
      std::move(step), StepPlan{.moves = {}, .peak_bytes = 0, .step_us = step_us}, absl::OkStatus(),
      std::vector<uint32_t>{1});
}

TEST(RecomputeTrials, ATrialThatBeganWithAPartOfASegmentWasTheStepIfItSavedTheSameInput) {
  for (const uint64_t input_bytes : {40, 41}) {
    RecomputeTrials choice;
    PlanCache cached;
    choice.Learn({}, EarlyPart(std::nullopt, 100), cached);
    EXPECT_EQ(choice.OnEarlySegment(cached.all().front(), /*is_recorded=*/true, cached), 0u);
    EXPECT_EQ(choice.OnEarlySegment(cached.all().front(), /*is_recorded=*/true, cached),
              std::nullopt);
    choice.OnBegin(/*signature=*/7);
    choice.Learn(choice.TakeSegmentLog(), EarlyPart(input_bytes, 10), cached);
    ASSERT_THAT(cached.all(), SizeIs(1));
    EXPECT_EQ(cached.all().front()->plan().step_us, input_bytes == 40 ? 10 : 100);
  }
}

TEST(RecomputeTrials, AMixIsTriedOnTopOfWhatIsComputedAgainAnyhow) {
  RecomputeTrials choice;
  choice.OnBegin(/*signature=*/1);
  choice.Try(Known({1}, 10, {true, false, false, false}, {2}));
  EXPECT_THAT(Kept(choice, 4), ElementsAre(false, true, false, true));
}

// A step of `known` that tries its mix, and what was planned of its record.
void TryMix(RecomputeTrials& choice, PlanCache& cached, const KnownPtr& recorded) {
  choice.OnBegin(/*signature=*/1);
  choice.Try(cached.all().front());
  choice.Learn(choice.TakeSegmentLog(), recorded, cached);
}

TEST(RecomputeTrials, AMixThatMakesTheStepShorterTakesItsPlace) {
  RecomputeTrials choice;
  PlanCache cached;
  choice.Learn({}, Known({1, 2}, 100, {false, false}, {1}), cached);
  TryMix(choice, cached, Known({1}, 90, {false, true}, {0}));
  ASSERT_THAT(cached.all(), SizeIs(1));
  EXPECT_EQ(cached.all().front()->plan().step_us, 90);
  EXPECT_THAT(cached.all().front()->recompute_set(), IsEmpty()) << "one try is enough";
}

// An update behind the last micro-batch, for example.
TEST(RecomputeTrials, WhatATrialDoesBehindItsLastUseSaysNothingOfItsMix) {
  const KnownPtr with = Known({1}, 90, {false, true}, {0});
  StepTrace step = with->step();
  step.intervals.back().compute_us += 1000;
  RecomputeTrials choice;
  PlanCache cached;
  choice.Learn({}, Known({1, 2}, 100, {false, false}, {1}), cached);
  TryMix(choice, cached,
         std::make_shared<const CachedPlan>(
             std::move(step), StepPlan{.moves = {}, .peak_bytes = 0, .step_us = 1090}));
  ASSERT_THAT(cached.all(), SizeIs(1));
  EXPECT_EQ(cached.all().front()->plan().step_us, 1090);
}

TEST(RecomputeTrials, AMixThatDoesNotIsForgottenAndNotTriedAgain) {
  const absl::Status shortfall = absl::ResourceExhaustedError("too little");
  for (const KnownPtr& with :
       {Known({1}, 110, {false, true}), Known({1}, 90, {false, true}, {}, shortfall)}) {
    RecomputeTrials choice;
    PlanCache cached;
    choice.Learn({}, Known({1, 2}, 100, {false, false}, {1}), cached);
    TryMix(choice, cached, with);
    ASSERT_THAT(cached.all(), SizeIs(1));
    EXPECT_EQ(cached.all().front()->plan().step_us, 100);
    EXPECT_THAT(cached.all().front()->recompute_set(), IsEmpty());
    // The step is recorded once more.
    const KnownPtr again = Known({1, 2}, 101, {false, false});
    EXPECT_FALSE(choice.MayRecompute({}, again->step(), cached));
    choice.Learn({}, again, cached);
    ASSERT_THAT(cached.all(), SizeIs(1));
    EXPECT_EQ(cached.all().front()->plan().step_us, 101);
    EXPECT_FALSE(choice.MayRecompute({}, again->step(), cached));
  }
}

TEST(RecomputeTrials, AMixIsLookedForOnceAStepHasRunAsPlanned) {
  RecomputeTrials choice;
  PlanCache cached;
  const KnownPtr first = Known({1, 2}, 100, {false, false});
  EXPECT_FALSE(choice.MayRecompute({}, first->step(), cached))
      << "its times are those of a first step";
  choice.Learn({}, first, cached);
  EXPECT_TRUE(choice.MayRecompute({}, first->step(), cached));
  EXPECT_FALSE(choice.MayRecompute({.tried = first, .is_recomputed = {}}, first->step(), cached));
  StepTrace by_host = first->step();
  by_host.timed_by_host = true;
  EXPECT_FALSE(choice.MayRecompute({}, by_host, cached));
}

TEST(RecomputeTrials, ATrialThatWasAnotherStepSaysNothing) {
  RecomputeTrials choice;
  PlanCache cached;
  choice.Learn({}, Known({1, 2}, 100, {false, false}, {1}), cached);
  for (int i = 1; i < RecomputeTrials::kMaxTries; ++i) {
    TryMix(choice, cached, Known({1}, 10, {false}));  // it ends after one segment
    ASSERT_THAT(cached.all(), SizeIs(1));
    EXPECT_EQ(cached.all().front()->plan().step_us, 100);
    EXPECT_THAT(cached.all().front()->recompute_set(), ElementsAre(1)) << "it may still be tried";
  }
  TryMix(choice, cached, Known({1}, 10, {false}));
  ASSERT_THAT(cached.all(), SizeIs(1));
  EXPECT_EQ(cached.all().front()->plan().step_us, 100);
  EXPECT_THAT(cached.all().front()->recompute_set(), IsEmpty());
}

// A step that begins with a segment, whose input has so many bytes, and saves something outside.
KnownPtr Early(double step_us, uint64_t input_bytes, uint64_t outside_bytes, bool again) {
  StepTrace step = ForwardAndBackward(100, {1, 2});
  step.objects[0].size_bytes = input_bytes;
  step.objects[1].size_bytes = outside_bytes;
  step.early_segments = 1;
  StepSegment& segment = step.segments.emplace_back();
  segment.is_recomputed = again;
  if (!again) segment.accesses = {0, 3};
  if (!again) segment.inputs = {0};
  return std::make_shared<const CachedPlan>(
      std::move(step), StepPlan{.moves = {}, .peak_bytes = 0, .step_us = step_us}, absl::OkStatus(),
      again ? std::vector<uint32_t>() : std::vector<uint32_t>{0});
}

TEST(RecomputeTrials, ATrialThatBeganWithASegmentWasTheStepIfItSavedTheSameInputAndTheSameOutside) {
  struct Case {
    KnownPtr recorded;
    double left_us;
  };
  for (const Case& trial :
       {Case{Early(10, 300, 40, /*again=*/true), 10}, Case{Early(10, 299, 40, /*again=*/true), 100},
        Case{Early(10, 300, 41, /*again=*/true), 100}}) {
    RecomputeTrials choice;
    PlanCache cached;
    choice.Learn({}, Early(100, 300, 40, /*again=*/false), cached);
    EXPECT_EQ(choice.OnEarlySegment(cached.all().front(), /*is_recorded=*/true, cached),
              std::nullopt);
    choice.OnBegin(/*signature=*/7);
    choice.Learn(choice.TakeSegmentLog(), trial.recorded, cached);
    ASSERT_THAT(cached.all(), SizeIs(1));
    EXPECT_EQ(cached.all().front()->plan().step_us, trial.left_us);
  }
}

TEST(RecomputeTrials, StepsThatBeginAlikeAndThenDifferAreNotMixed) {
  RecomputeTrials choice;
  PlanCache cached;
  const KnownPtr recompute = Known({1, 2}, 90, {true, false});
  choice.OnBegin(/*signature=*/1);
  EXPECT_EQ(choice.Follow(recompute), nullptr);
  EXPECT_THAT(Kept(choice, 1), ElementsAre(false));
  EXPECT_EQ(choice.Follow(nullptr), recompute) << "another step: it is to be forgotten";
  const KnownPtr plain = Known({1, 2}, 100, {false, false});
  choice.Learn({}, plain, cached);
  EXPECT_FALSE(choice.MayRecompute({}, plain->step(), cached));
  const KnownPtr other = Known({7, 2}, 100, {false, false});
  choice.Learn({}, other, cached);
  EXPECT_TRUE(choice.MayRecompute({}, other->step(), cached)) << "it begins otherwise";
  // One whose mix was found before is not run with it.
  EXPECT_FALSE(choice.MayTry(*Known({1, 2}, 100, {false, false}, {0}), cached));
  EXPECT_TRUE(choice.MayTry(*Known({7, 2}, 100, {false, false}, {0}), cached));
}

TEST(RecomputeTrials, AMixIsStillToBeLookedForWhereAnotherStepBeganAlike) {
  RecomputeTrials choice;
  PlanCache cached;
  const KnownPtr step = Known({1, 2}, 100, {false, false});
  const KnownPtr alike = Known({1, 3}, 100, {false, false});
  choice.Learn({}, step, cached);
  choice.Learn({}, alike, cached);
  choice.Learn({}, step, cached);
  EXPECT_FALSE(cached.AnyWantsRecomputeTrial());
  cached.Forget(*alike);
  EXPECT_TRUE(cached.AnyWantsRecomputeTrial());
  choice.Learn({}, step, cached);
  EXPECT_FALSE(cached.AnyWantsRecomputeTrial());
}

TEST(RecomputeTrials, AStepThatWasLostBeforeAnythingWasComputedAgainIsMixedAsEver) {
  RecomputeTrials choice;
  PlanCache cached;
  const KnownPtr recompute = Known({1, 2}, 90, {false, true});
  choice.OnBegin(/*signature=*/1);
  choice.Follow(recompute);
  Kept(choice, 1);
  EXPECT_EQ(choice.Follow(nullptr), nullptr);
}

TEST(PlanCache, AStepThatAddsToGradientsIsNotTheOneThatMakesThem) {
  PlanCache cached;
  const KnownPtr makes = Known({1, 2}, 10);
  const KnownPtr adds = WithGradients(makes);
  const auto any = [](const CachedPlan&) { return true; };
  cached.Learn(makes);
  cached.set_begins_with_gradients(true);
  EXPECT_EQ(cached.Find(any), makes) << "until one like it is known";
  EXPECT_EQ(cached.Likeliest(), makes);
  cached.Learn(adds);
  EXPECT_THAT(cached.all(), SizeIs(2));
  EXPECT_EQ(cached.Find(any), adds);
  EXPECT_FALSE(cached.MayBe(*makes));
  cached.set_begins_with_gradients(false);
  EXPECT_EQ(cached.Find(any), makes);
  EXPECT_EQ(cached.Likeliest(), makes);
  cached.Forget(*makes);
  EXPECT_EQ(cached.Find(any), nullptr) << "that takes less";
}

TEST(RecomputeTrials, TheMixOfAStepThatMakesGradientsIsNotTriedByOneThatAddsToThem) {
  RecomputeTrials choice;
  PlanCache cached;
  const KnownPtr makes = Known({1, 2}, 100, {false, false}, {0});
  cached.Learn(makes);
  EXPECT_TRUE(choice.MayTry(*makes, cached));
  cached.set_begins_with_gradients(true);
  EXPECT_FALSE(choice.MayTry(*makes, cached));
}

TEST(PlanCache, StepsThatBeginAlikeMayBeMixedWhereTheirGradientsTell) {
  PlanCache cached;
  const KnownPtr makes = Known({1, 2}, 10, {false, false});
  cached.Learn(makes);
  cached.Learn(WithGradients(Known({1, 3}, 10, {false, false})));
  EXPECT_TRUE(cached.MayRecompute(makes->step()));
  EXPECT_TRUE(cached.AnyWantsRecomputeTrial());
}

// Such a one may never come again.
TEST(PlanCache, NobodyRecordsForTheMixOfAStepThatDoesNotBegin) {
  PlanCache cached;
  const KnownPtr makes = Known({1, 2}, 10, {false, false});
  cached.Learn(makes);
  cached.Learn(WithGradients(makes)->WithRecomputeTried());  // that one does not
  EXPECT_TRUE(cached.AnyWantsRecomputeTrial());
  cached.set_begins_with_gradients(true);
  EXPECT_FALSE(cached.AnyWantsRecomputeTrial());
}

TEST(PlanCache, WhatIsLikeAKnownStepTakesItsPlace) {
  PlanCache cached;
  cached.Learn(Known({1}, 10));
  cached.Learn(Known({2}, 20));
  cached.Learn(Known({1}, 30));
  ASSERT_THAT(cached.all(), SizeIs(2));
  EXPECT_EQ(cached.all().front()->plan().step_us, 30);
  EXPECT_EQ(cached.FindLike(Known({2}, 0)->step())->plan().step_us, 20);
  EXPECT_EQ(cached.FindLike(Known({3}, 0)->step()), nullptr);
  cached.Forget(*cached.all().front());
  ASSERT_THAT(cached.all(), SizeIs(1));
  EXPECT_EQ(cached.all().front()->plan().step_us, 20);
}

TEST(PlanCache, TheStepThatCameNextTheLastTimeIsLookedAtFirst) {
  PlanCache cached;
  const KnownPtr a = Known({1}, 10), b = Known({2}, 20), c = Known({3}, 30);
  for (const KnownPtr& step : {a, b, c}) cached.Learn(step);
  const auto run = [&](const KnownPtr& step) {
    cached.OnBegin();
    const KnownPtr first = cached.all().front();
    cached.Find([&](const CachedPlan& one) { return &one == step.get(); });
    cached.OnEnd(step.get());
    return first;
  };
  for (const KnownPtr& step : {a, b, c, a}) run(step);
  EXPECT_EQ(run(b), b);
  EXPECT_EQ(run(c), c);
  EXPECT_EQ(run(a), a);
}

TEST(PlanCache, WhatCameAfterAStepThatNobodyKnowsIsLookedAtFirstAfterAnother) {
  PlanCache cached;
  const KnownPtr a = Known({1}, 10), b = Known({2}, 20);
  for (const KnownPtr& step : {a, b}) cached.Learn(step);
  for (const KnownPtr& step : {KnownPtr(), a, b, KnownPtr()}) {
    cached.OnBegin();
    cached.Find([&](const CachedPlan& one) { return &one == step.get(); });
    cached.OnEnd(step.get());
  }
  ASSERT_EQ(cached.all().front(), b);
  cached.OnBegin();
  EXPECT_EQ(cached.all().front(), a);
}

}  // namespace
}  // namespace pinion::testing
