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
#include "pinion/engine/schedule/plan_cache.h"
#include "pinion/tests/engine/planner/small_steps.h"

namespace pinion::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using KnownPtr = std::shared_ptr<const CachedPlan>;

KnownPtr Planned(StepTrace step, double step_us = 0, std::vector<uint32_t> recompute_set = {},
                 absl::Status shortfall = absl::OkStatus()) {
  return std::make_shared<const CachedPlan>(
      std::move(step), StepPlan{.moves = {}, .peak_bytes = 0, .step_us = step_us},
      std::move(shortfall), std::move(recompute_set));
}

// Steps with the same signatures are alike. `again`: by segment; the last one saves the second
// object if it is kept.
KnownPtr Known(const std::vector<uint64_t>& signatures, double step_us,
               const std::vector<bool>& again = {}, std::vector<uint32_t> recompute_set = {},
               absl::Status shortfall = absl::OkStatus()) {
  StepTrace step = ForwardAndBackward(100, signatures);
  for (const bool is_again : again) step.segments.emplace_back().is_recomputed = is_again;
  if (signatures.size() == 2 && !again.empty() && !again.back())
    step.segments.back().accesses = {1, 2};
  return Planned(std::move(step), step_us, std::move(recompute_set), std::move(shortfall));
}

// The same step, which adds to gradients.
KnownPtr WithGradients(const KnownPtr& cached) {
  StepTrace step = cached->step();
  step.begins_with_gradients = true;
  return std::make_shared<const CachedPlan>(std::move(step), cached->plan(), cached->shortfall());
}

class RecomputeTrialsTest : public ::testing::Test {
 protected:
  // Whether each of the next segments is kept.
  std::vector<bool> Kept(uint32_t segments) {
    std::vector<bool> kept;
    for (uint32_t i = 0; i < segments; ++i) {
      const std::optional<uint32_t> ordinal = choice_.OnSegment();
      EXPECT_EQ(ordinal.value_or(i), i);
      kept.push_back(ordinal.has_value());
    }
    return kept;
  }
  // Runs a step of the plan that was followed last, which tries its mix. `recorded` is what was
  // planned of the record.
  void TryMix(const KnownPtr& recorded) {
    choice_.OnBegin(/*signature=*/1);
    choice_.Try(cached_.all().front());
    choice_.Learn(choice_.TakeSegmentLog(), recorded, cached_);
  }
  // Learns a plan of an ordinary step.
  void Learn(const KnownPtr& cached) { choice_.Learn({}, cached, cached_); }
  bool MayRecompute(const StepTrace& step) { return choice_.MayRecompute({}, step, cached_); }
  // Runs a step of this plan; null: of none. Returns the plan that the cache offered first.
  KnownPtr Run(const KnownPtr& step) {
    cached_.OnBegin();
    KnownPtr first = cached_.all().front();
    cached_.Find([&](const CachedPlan& one) { return &one == step.get(); });
    cached_.OnEnd(step.get());
    return first;
  }
  // The segments of the last step, as its record has them.
  std::vector<StepSegment> Noted() {
    StepTrace step;
    RecomputeTrials::Note(choice_.TakeSegmentLog(), step);
    return step.segments;
  }
  // The times of all plans, the last followed first.
  std::vector<double> StepTimes() const {
    std::vector<double> times;
    for (const KnownPtr& cached : cached_.all()) times.push_back(cached->plan().step_us);
    return times;
  }

  RecomputeTrials choice_;
  PlanCache cached_;
};

using PlanCacheTest = RecomputeTrialsTest;

TEST_F(RecomputeTrialsTest, AStepThatNobodyKnowsKeepsAll) {
  choice_.OnBegin(/*signature=*/1);
  EXPECT_THAT(Kept(3), ElementsAre(true, true, true));
  const std::vector<StepSegment> segments = Noted();
  ASSERT_THAT(segments, SizeIs(3));
  for (const StepSegment& segment : segments) EXPECT_FALSE(segment.is_recomputed);
}

TEST_F(RecomputeTrialsTest, AKnownStepSaysWhichAreComputedAgain) {
  choice_.OnBegin(/*signature=*/1);
  choice_.Follow(Known({1}, 10, {false, true, false}));
  EXPECT_THAT(Kept(4), ElementsAre(true, false, true, true));
  const std::vector<StepSegment> segments = Noted();
  ASSERT_THAT(segments, SizeIs(4));
  EXPECT_TRUE(segments[1].is_recomputed);
  EXPECT_FALSE(segments[2].is_recomputed);
  choice_.OnBegin(/*signature=*/1);
  EXPECT_THAT(Kept(2), ElementsAre(true, true)) << "the next step follows nobody yet";
}

TEST_F(RecomputeTrialsTest, WhereTheStepIsLostWhatComesIsKept) {
  choice_.OnBegin(/*signature=*/1);
  choice_.Follow(Known({1}, 10, {true, true, true}));
  EXPECT_THAT(Kept(1), ElementsAre(false));
  choice_.Follow(nullptr);
  EXPECT_TRUE(choice_.OnSegment().has_value());
}

TEST_F(RecomputeTrialsTest, OnlyAStepThatHasComputedTheSameAgainFits) {
  choice_.OnBegin(/*signature=*/1);
  choice_.Follow(Known({1}, 10, {false, true}));
  EXPECT_TRUE(choice_.Fits(*Known({1}, 10, {true, false})));
  Kept(2);
  EXPECT_TRUE(choice_.Fits(*Known({1}, 10, {false, true})));
  EXPECT_TRUE(choice_.Fits(*Known({1}, 10, {false, true, true})));
  EXPECT_FALSE(choice_.Fits(*Known({1}, 10, {false, false})));
  EXPECT_FALSE(choice_.Fits(*Known({1}, 10, {true, true})));
  EXPECT_FALSE(choice_.Fits(*Known({1}, 10)));
}

// As Known, with segments 1 and 2 inside of segment 0, and segment 4 inside of segment 3.
KnownPtr Nested(const std::vector<bool>& again, std::vector<uint32_t> recompute_set = {},
                uint32_t early = 0) {
  StepTrace step = Known({1}, 10, again)->step();
  step.segments[1].outer = step.segments[2].outer = 0;
  step.segments[4].outer = 3;
  step.early_segments = early;
  return Planned(std::move(step), 0, std::move(recompute_set));
}

TEST_F(RecomputeTrialsTest,
       WhatIsInsideOfASegmentThatIsComputedAgainDoesNotBeginAndKeepsItsOrdinal) {
  choice_.OnBegin(/*signature=*/1);
  choice_.Follow(Nested({true, true, true, false, true}));
  EXPECT_EQ(choice_.OnSegment(), std::nullopt);
  EXPECT_EQ(choice_.OnSegment(), 3u) << "those inside of the first one do not begin";
  EXPECT_EQ(choice_.OnSegment(), std::nullopt);
  EXPECT_EQ(choice_.OnSegment(), 5u);
  EXPECT_TRUE(choice_.Fits(*Nested({true, true, true, false, true})));
  EXPECT_FALSE(choice_.Fits(*Nested({false, true, true, false, true})));
  const std::vector<StepSegment> segments = Noted();
  ASSERT_THAT(segments, SizeIs(6));
  EXPECT_TRUE(segments[2].is_recomputed);
  EXPECT_FALSE(segments[3].is_recomputed);
  EXPECT_EQ(segments[1].outer, 0u);
  EXPECT_EQ(segments[2].outer, 0u);
  EXPECT_EQ(segments[4].outer, 3u);
}

TEST_F(RecomputeTrialsTest, InsideIsAtAnyDepth) {
  StepTrace step = Known({1}, 10, {true, true, true, false})->step();
  step.segments[1].outer = 0;
  step.segments[2].outer = 1;
  choice_.OnBegin(/*signature=*/1);
  choice_.Follow(Planned(std::move(step)));
  EXPECT_EQ(choice_.OnSegment(), std::nullopt);
  EXPECT_EQ(choice_.OnSegment(), 3u);
}

TEST_F(RecomputeTrialsTest, AMixMayTakeAWholeSegmentOrPartOfOne) {
  for (const bool whole : {true, false}) {
    choice_ = {};
    choice_.OnBegin(/*signature=*/1);
    choice_.Try(Nested({false, false, false, false, false}, {whole ? 0u : 1u, 4u}));
    EXPECT_EQ(choice_.OnSegment().has_value(), !whole);
    if (!whole) {
      EXPECT_EQ(choice_.OnSegment(), std::nullopt);
      EXPECT_EQ(choice_.OnSegment(), 2u);
    }
    EXPECT_EQ(choice_.OnSegment(), 3u);
    EXPECT_EQ(choice_.OnSegment(), std::nullopt);
  }
}

TEST_F(RecomputeTrialsTest, ThoseThatWouldBeginEarlyInsideOfAnEarlyOneCountAsEarly) {
  const KnownPtr cached = Nested({true, true, true, false, false}, {}, /*early=*/2);
  EXPECT_EQ(choice_.OnEarlySegment(cached, /*is_recorded=*/false, PlanCache()), std::nullopt);
  choice_.OnBegin(/*signature=*/1);
  EXPECT_TRUE(choice_.Fits(*cached));
  EXPECT_FALSE(choice_.Fits(*Nested({true, true, true, false, false}, {}, /*early=*/1)));
  EXPECT_FALSE(choice_.Fits(*Nested({true, true, true, false, false}, {}, /*early=*/3)));
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
  return Planned(std::move(step), step_us, std::vector<uint32_t>{again.value_or(1)});
}

TEST_F(RecomputeTrialsTest, ATrialOfPartOfASegmentWasTheStepIfItSavedTheSameBesides) {
  for (const bool is_same : {true, false}) {
    choice_ = {};
    cached_ = {};
    Learn(Parts(std::nullopt, 100));
    TryMix(Parts(1, 90, is_same ? 400 : 401));
    EXPECT_EQ(StepTimes().front(), is_same ? 90 : 100);
  }
}

// A step that begins with a segment inside another one. The segment has an input of 40 bytes, and
// saves 300. With `input_bytes` it was recomputed, and the step saves an input of that size first.
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
  return Planned(std::move(step), step_us, std::vector<uint32_t>{1});
}

TEST_F(RecomputeTrialsTest, ATrialThatBeganWithAPartOfASegmentWasTheStepIfItSavedTheSameInput) {
  for (const uint64_t input_bytes : {40, 41}) {
    choice_ = {};
    cached_ = {};
    Learn(EarlyPart(std::nullopt, 100));
    EXPECT_EQ(choice_.OnEarlySegment(cached_.all().front(), /*is_recorded=*/true, cached_), 0u);
    EXPECT_EQ(choice_.OnEarlySegment(cached_.all().front(), /*is_recorded=*/true, cached_),
              std::nullopt);
    choice_.OnBegin(/*signature=*/7);
    choice_.Learn(choice_.TakeSegmentLog(), EarlyPart(input_bytes, 10), cached_);
    EXPECT_THAT(StepTimes(), ElementsAre(input_bytes == 40 ? 10 : 100));
  }
}

TEST_F(RecomputeTrialsTest, AMixIsTriedOnTopOfWhatIsComputedAgainAnyhow) {
  choice_.OnBegin(/*signature=*/1);
  choice_.Try(Known({1}, 10, {true, false, false, false}, {2}));
  EXPECT_THAT(Kept(4), ElementsAre(false, true, false, true));
}

TEST_F(RecomputeTrialsTest, AMixThatMakesTheStepShorterTakesItsPlace) {
  Learn(Known({1, 2}, 100, {false, false}, {1}));
  TryMix(Known({1}, 90, {false, true}, {0}));
  EXPECT_THAT(StepTimes(), ElementsAre(90));
  EXPECT_THAT(cached_.all().front()->recompute_set(), IsEmpty()) << "one try is enough";
}

// An update behind the last micro-batch, for example.
TEST_F(RecomputeTrialsTest, WhatATrialDoesBehindItsLastUseSaysNothingOfItsMix) {
  StepTrace step = Known({1}, 90, {false, true}, {0})->step();
  step.intervals.back().compute_us += 1000;
  Learn(Known({1, 2}, 100, {false, false}, {1}));
  TryMix(Planned(std::move(step), 1090));
  EXPECT_THAT(StepTimes(), ElementsAre(1090));
}

TEST_F(RecomputeTrialsTest, AMixThatDoesNotIsForgottenAndNotTriedAgain) {
  const absl::Status shortfall = absl::ResourceExhaustedError("too little");
  for (const KnownPtr& with :
       {Known({1}, 110, {false, true}), Known({1}, 90, {false, true}, {}, shortfall)}) {
    choice_ = {};
    cached_ = {};
    Learn(Known({1, 2}, 100, {false, false}, {1}));
    TryMix(with);
    EXPECT_THAT(StepTimes(), ElementsAre(100));
    EXPECT_THAT(cached_.all().front()->recompute_set(), IsEmpty());
    // The step is recorded once more.
    const KnownPtr again = Known({1, 2}, 101, {false, false});
    EXPECT_FALSE(MayRecompute(again->step()));
    Learn(again);
    EXPECT_THAT(StepTimes(), ElementsAre(101));
    EXPECT_FALSE(MayRecompute(again->step()));
  }
}

TEST_F(RecomputeTrialsTest, AMixIsLookedForOnceAStepHasRunAsPlanned) {
  const KnownPtr first = Known({1, 2}, 100, {false, false});
  EXPECT_FALSE(MayRecompute(first->step())) << "its times are those of a first step";
  Learn(first);
  EXPECT_TRUE(MayRecompute(first->step()));
  EXPECT_FALSE(choice_.MayRecompute({.tried = first, .is_recomputed = {}}, first->step(), cached_));
  StepTrace by_host = first->step();
  by_host.timed_by_host = true;
  EXPECT_FALSE(MayRecompute(by_host));
}

TEST_F(RecomputeTrialsTest, ATrialThatWasAnotherStepSaysNothing) {
  Learn(Known({1, 2}, 100, {false, false}, {1}));
  for (int i = 1; i < RecomputeTrials::kMaxTries; ++i) {
    TryMix(Known({1}, 10, {false}));  // it ends after one segment
    EXPECT_THAT(StepTimes(), ElementsAre(100));
    EXPECT_THAT(cached_.all().front()->recompute_set(), ElementsAre(1)) << "it may still be tried";
  }
  TryMix(Known({1}, 10, {false}));
  EXPECT_THAT(StepTimes(), ElementsAre(100));
  EXPECT_THAT(cached_.all().front()->recompute_set(), IsEmpty());
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
  return Planned(std::move(step), step_us,
                 again ? std::vector<uint32_t>() : std::vector<uint32_t>{0});
}

TEST_F(RecomputeTrialsTest,
       ATrialThatBeganWithASegmentWasTheStepIfItSavedTheSameInputAndTheSameOutside) {
  const std::vector<std::pair<KnownPtr, double>> trials = {
      {Early(10, 300, 40, /*again=*/true), 10},
      {Early(10, 299, 40, /*again=*/true), 100},
      {Early(10, 300, 41, /*again=*/true), 100}};
  for (const auto& [recorded, step_us] : trials) {
    choice_ = {};
    cached_ = {};
    Learn(Early(100, 300, 40, /*again=*/false));
    EXPECT_EQ(choice_.OnEarlySegment(cached_.all().front(), /*is_recorded=*/true, cached_),
              std::nullopt);
    choice_.OnBegin(/*signature=*/7);
    choice_.Learn(choice_.TakeSegmentLog(), recorded, cached_);
    EXPECT_THAT(StepTimes(), ElementsAre(step_us));
  }
}

TEST_F(RecomputeTrialsTest, StepsThatBeginAlikeAndThenDifferAreNotMixed) {
  const KnownPtr recompute = Known({1, 2}, 90, {true, false});
  choice_.OnBegin(/*signature=*/1);
  EXPECT_EQ(choice_.Follow(recompute), nullptr);
  EXPECT_THAT(Kept(1), ElementsAre(false));
  EXPECT_EQ(choice_.Follow(nullptr), recompute) << "another step: it is to be forgotten";
  const KnownPtr plain = Known({1, 2}, 100, {false, false});
  Learn(plain);
  EXPECT_FALSE(MayRecompute(plain->step()));
  const KnownPtr other = Known({7, 2}, 100, {false, false});
  Learn(other);
  EXPECT_TRUE(MayRecompute(other->step())) << "it begins otherwise";
  // One whose mix was found before is not run with it.
  EXPECT_FALSE(choice_.MayTry(*Known({1, 2}, 100, {false, false}, {0}), cached_));
  EXPECT_TRUE(choice_.MayTry(*Known({7, 2}, 100, {false, false}, {0}), cached_));
}

TEST_F(RecomputeTrialsTest, AMixIsStillToBeLookedForWhereAnotherStepBeganAlike) {
  const KnownPtr step = Known({1, 2}, 100, {false, false});
  const KnownPtr alike = Known({1, 3}, 100, {false, false});
  Learn(step);
  Learn(alike);
  Learn(step);
  EXPECT_FALSE(cached_.AnyWantsRecomputeTrial());
  cached_.Forget(*alike);
  EXPECT_TRUE(cached_.AnyWantsRecomputeTrial());
  Learn(step);
  EXPECT_FALSE(cached_.AnyWantsRecomputeTrial());
}

TEST_F(RecomputeTrialsTest, AStepThatWasLostBeforeAnythingWasComputedAgainIsMixedAsEver) {
  const KnownPtr recompute = Known({1, 2}, 90, {false, true});
  choice_.OnBegin(/*signature=*/1);
  choice_.Follow(recompute);
  Kept(1);
  EXPECT_EQ(choice_.Follow(nullptr), nullptr);
}

TEST_F(PlanCacheTest, AStepThatAddsToGradientsIsNotTheOneThatMakesThem) {
  const KnownPtr makes = Known({1, 2}, 10);
  const KnownPtr adds = WithGradients(makes);
  const auto any = [](const CachedPlan&) { return true; };
  cached_.Learn(makes);
  cached_.set_begins_with_gradients(true);
  EXPECT_EQ(cached_.Find(any), makes) << "until one like it is known";
  EXPECT_EQ(cached_.Likeliest(), makes);
  cached_.Learn(adds);
  EXPECT_THAT(cached_.all(), SizeIs(2));
  EXPECT_EQ(cached_.Find(any), adds);
  EXPECT_FALSE(cached_.MayBe(*makes));
  cached_.set_begins_with_gradients(false);
  EXPECT_EQ(cached_.Find(any), makes);
  EXPECT_EQ(cached_.Likeliest(), makes);
  cached_.Forget(*makes);
  EXPECT_EQ(cached_.Find(any), nullptr) << "that takes less";
}

TEST_F(RecomputeTrialsTest, TheMixOfAStepThatMakesGradientsIsNotTriedByOneThatAddsToThem) {
  const KnownPtr makes = Known({1, 2}, 100, {false, false}, {0});
  cached_.Learn(makes);
  EXPECT_TRUE(choice_.MayTry(*makes, cached_));
  cached_.set_begins_with_gradients(true);
  EXPECT_FALSE(choice_.MayTry(*makes, cached_));
}

TEST_F(PlanCacheTest, StepsThatBeginAlikeMayBeMixedWhereTheirGradientsTell) {
  const KnownPtr makes = Known({1, 2}, 10, {false, false});
  cached_.Learn(makes);
  cached_.Learn(WithGradients(Known({1, 3}, 10, {false, false})));
  EXPECT_TRUE(cached_.MayRecompute(makes->step()));
  EXPECT_TRUE(cached_.AnyWantsRecomputeTrial());
}

// Such a one may never come again.
TEST_F(PlanCacheTest, NobodyRecordsForTheMixOfAStepThatDoesNotBegin) {
  const KnownPtr makes = Known({1, 2}, 10, {false, false});
  cached_.Learn(makes);
  cached_.Learn(WithGradients(makes)->WithRecomputeTried());  // that one does not
  EXPECT_TRUE(cached_.AnyWantsRecomputeTrial());
  cached_.set_begins_with_gradients(true);
  EXPECT_FALSE(cached_.AnyWantsRecomputeTrial());
}

TEST_F(PlanCacheTest, WhatIsLikeAKnownStepTakesItsPlace) {
  cached_.Learn(Known({1}, 10));
  cached_.Learn(Known({2}, 20));
  cached_.Learn(Known({1}, 30));
  EXPECT_THAT(StepTimes(), ElementsAre(30, 20));
  EXPECT_EQ(cached_.FindLike(Known({2}, 0)->step())->plan().step_us, 20);
  EXPECT_EQ(cached_.FindLike(Known({3}, 0)->step()), nullptr);
  cached_.Forget(*cached_.all().front());
  EXPECT_THAT(StepTimes(), ElementsAre(20));
}

TEST_F(PlanCacheTest, TheStepThatCameNextTheLastTimeIsLookedAtFirst) {
  const KnownPtr a = Known({1}, 10), b = Known({2}, 20), c = Known({3}, 30);
  for (const KnownPtr& step : {a, b, c}) cached_.Learn(step);
  for (const KnownPtr& step : {a, b, c, a}) Run(step);
  for (const KnownPtr& step : {b, c, a}) EXPECT_EQ(Run(step), step);
}

TEST_F(PlanCacheTest, WhatCameAfterAStepThatNobodyKnowsIsLookedAtFirstAfterAnother) {
  const KnownPtr a = Known({1}, 10), b = Known({2}, 20);
  for (const KnownPtr& step : {a, b}) cached_.Learn(step);
  for (const KnownPtr& step : {KnownPtr(), a, b, KnownPtr()}) Run(step);
  ASSERT_EQ(cached_.all().front(), b);
  cached_.OnBegin();
  EXPECT_EQ(cached_.all().front(), a);
}

}  // namespace
}  // namespace pinion::testing
