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

using KnownPtr = std::shared_ptr<const KnownStep>;

// Steps with the same signatures are alike. `again`: by segment; the last one saves the second
// object if it is kept.
KnownPtr Known(const std::vector<uint64_t>& signatures, double step_us,
               const std::vector<bool>& again = {}, std::vector<uint32_t> mix = {},
               absl::Status shortfall = absl::OkStatus()) {
  StepRecord step = ForwardAndBackward(100, signatures);
  for (const bool is_again : again) step.segments.emplace_back().computed_again = is_again;
  if (signatures.size() == 2 && !again.empty() && !again.back()) step.segments.back().uses = {1, 2};
  return std::make_shared<const KnownStep>(
      std::move(step), StepPlan{.moves = {}, .peak_bytes = 0, .step_us = step_us},
      std::move(shortfall), std::move(mix));
}

// The same step, which adds to gradients.
KnownPtr WithGradients(const KnownPtr& known) {
  StepRecord step = known->step();
  step.begins_with_gradients = true;
  return std::make_shared<const KnownStep>(std::move(step), known->plan(), known->shortfall());
}

std::vector<bool> Kept(SegmentChoice& choice, int segments) {
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

TEST(SegmentChoice, AStepThatNobodyKnowsKeepsAll) {
  SegmentChoice choice;
  choice.OnBegin(/*signature=*/1);
  EXPECT_THAT(Kept(choice, 3), ElementsAre(true, true, true));
  StepRecord step;
  SegmentChoice::Note(choice.TakeRan(), step);
  ASSERT_THAT(step.segments, SizeIs(3));
  for (const StepSegment& segment : step.segments) EXPECT_FALSE(segment.computed_again);
}

TEST(SegmentChoice, AKnownStepSaysWhichAreComputedAgain) {
  SegmentChoice choice;
  choice.OnBegin(/*signature=*/1);
  choice.Follow(Known({1}, 10, {false, true, false}));
  EXPECT_THAT(Kept(choice, 4), ElementsAre(true, false, true, true));
  StepRecord step;
  SegmentChoice::Note(choice.TakeRan(), step);
  ASSERT_THAT(step.segments, SizeIs(4));
  EXPECT_TRUE(step.segments[1].computed_again);
  EXPECT_FALSE(step.segments[2].computed_again);
  choice.OnBegin(/*signature=*/1);
  EXPECT_THAT(Kept(choice, 2), ElementsAre(true, true)) << "the next step follows nobody yet";
}

TEST(SegmentChoice, WhereTheStepIsLostWhatComesIsKept) {
  SegmentChoice choice;
  choice.OnBegin(/*signature=*/1);
  choice.Follow(Known({1}, 10, {true, true, true}));
  EXPECT_THAT(Kept(choice, 1), ElementsAre(false));
  choice.Follow(nullptr);
  EXPECT_TRUE(choice.OnSegment().has_value());
}

TEST(SegmentChoice, OnlyAStepThatHasComputedTheSameAgainFits) {
  SegmentChoice choice;
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
KnownPtr Nested(const std::vector<bool>& again, std::vector<uint32_t> mix = {},
                uint32_t early = 0) {
  StepRecord step = Known({1}, 10, again)->step();
  step.segments[1].outer = step.segments[2].outer = 0;
  step.segments[4].outer = 3;
  step.early_segments = early;
  return std::make_shared<const KnownStep>(std::move(step), StepPlan(), absl::OkStatus(),
                                           std::move(mix));
}

TEST(SegmentChoice, WhatIsInsideOfASegmentThatIsComputedAgainDoesNotBeginAndKeepsItsOrdinal) {
  SegmentChoice choice;
  choice.OnBegin(/*signature=*/1);
  choice.Follow(Nested({true, true, true, false, true}));
  EXPECT_EQ(choice.OnSegment(), std::nullopt);
  EXPECT_EQ(choice.OnSegment(), 3u) << "those inside of the first one do not begin";
  EXPECT_EQ(choice.OnSegment(), std::nullopt);
  EXPECT_EQ(choice.OnSegment(), 5u);
  EXPECT_TRUE(choice.Fits(*Nested({true, true, true, false, true})));
  EXPECT_FALSE(choice.Fits(*Nested({false, true, true, false, true})));
  StepRecord step;
  SegmentChoice::Note(choice.TakeRan(), step);
  ASSERT_THAT(step.segments, SizeIs(6));
  EXPECT_TRUE(step.segments[2].computed_again);
  EXPECT_FALSE(step.segments[3].computed_again);
  EXPECT_EQ(step.segments[1].outer, 0u);
  EXPECT_EQ(step.segments[2].outer, 0u);
  EXPECT_EQ(step.segments[4].outer, 3u);
}

TEST(SegmentChoice, InsideIsAtAnyDepth) {
  StepRecord step = Known({1}, 10, {true, true, true, false})->step();
  step.segments[1].outer = 0;
  step.segments[2].outer = 1;
  SegmentChoice choice;
  choice.OnBegin(/*signature=*/1);
  choice.Follow(std::make_shared<const KnownStep>(std::move(step), StepPlan()));
  EXPECT_EQ(choice.OnSegment(), std::nullopt);
  EXPECT_EQ(choice.OnSegment(), 3u);
}

TEST(SegmentChoice, AMixMayTakeAWholeSegmentOrPartOfOne) {
  for (const bool whole : {true, false}) {
    SegmentChoice choice;
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

TEST(SegmentChoice, ThoseThatWouldBeginEarlyInsideOfAnEarlyOneCountAsEarly) {
  SegmentChoice choice;
  const KnownPtr known = Nested({true, true, true, false, false}, {}, /*early=*/2);
  EXPECT_EQ(choice.OnEarlySegment(known, /*is_recorded=*/false, KnownSteps()), std::nullopt);
  choice.OnBegin(/*signature=*/1);
  EXPECT_TRUE(choice.Fits(*known));
  EXPECT_FALSE(choice.Fits(*Nested({true, true, true, false, false}, {}, /*early=*/1)));
  EXPECT_FALSE(choice.Fits(*Nested({true, true, true, false, false}, {}, /*early=*/3)));
}

// What segments 1 and 2, inside of segment 0, save: 200 and 300 bytes; the first one's input has
// 100, and what segment 0 saves besides has 400. `again`: which of them is computed again.
KnownPtr Parts(std::optional<uint32_t> again, double step_us, uint64_t besides = 400) {
  StepRecord step;
  step.segments.resize(3);
  step.segments[1].outer = step.segments[2].outer = 0;
  const auto save = [&step](uint64_t size_bytes, const std::vector<uint32_t>& segments) {
    for (const uint32_t i : segments) {
      step.segments[i].uses.push_back(static_cast<uint32_t>(step.uses.size()));
    }
    step.uses.push_back(static_cast<uint32_t>(step.objects.size()));
    step.objects.push_back({.size_bytes = size_bytes, .signature = size_bytes});
  };
  save(100, {});
  if (again == 0u) {
    for (StepSegment& segment : step.segments) segment.computed_again = true;
  } else {
    for (const uint32_t i : {1u, 2u}) {
      step.segments[i].computed_again = again == i;
      if (again == i) {
        save(50, {0});  // its input, which nobody else saves
      } else {
        save(100 * uint64_t{i + 1}, {0, i});
      }
    }
    save(besides, {0});
  }
  step.stretches.resize(step.uses.size() + 1);
  return std::make_shared<const KnownStep>(
      std::move(step), StepPlan{.moves = {}, .peak_bytes = 0, .step_us = step_us}, absl::OkStatus(),
      std::vector<uint32_t>{again.value_or(1)});
}

TEST(SegmentChoice, ATrialOfPartOfASegmentWasTheStepIfItSavedTheSameBesides) {
  for (const bool is_same : {true, false}) {
    SegmentChoice choice;
    KnownSteps known;
    choice.Learn({}, Parts(std::nullopt, 100), known);
    choice.OnBegin(/*signature=*/1);
    choice.Try(known.all().front());
    choice.Learn(choice.TakeRan(), Parts(1, 90, is_same ? 400 : 401), known);
    EXPECT_EQ(known.all().front()->plan().step_us, is_same ? 90 : 100);
  }
}

// A step that begins with a segment inside of another one, whose input has 40 bytes and which saves
// 300; `input_bytes`: of the input that is saved first, where it was computed again.
KnownPtr EarlyPart(std::optional<uint64_t> input_bytes, double step_us) {
  StepRecord step = ForwardAndBackward({{.size_bytes = input_bytes.value_or(300), .signature = 7}});
  step.segments.resize(2);
  step.segments[1].outer = 0;
  step.early_segments = 2;
  if (input_bytes.has_value()) {
    step.segments[1].computed_again = true;
    step.segments[0].uses = {0};
  } else {
    step.unsaved_inputs = {{.size_bytes = 40}};
    step.segments[1].inputs = {1};
    step.segments[0].uses = step.segments[1].uses = {0, 1};
  }
  return std::make_shared<const KnownStep>(
      std::move(step), StepPlan{.moves = {}, .peak_bytes = 0, .step_us = step_us}, absl::OkStatus(),
      std::vector<uint32_t>{1});
}

TEST(SegmentChoice, ATrialThatBeganWithAPartOfASegmentWasTheStepIfItSavedTheSameInput) {
  for (const uint64_t input_bytes : {40, 41}) {
    SegmentChoice choice;
    KnownSteps known;
    choice.Learn({}, EarlyPart(std::nullopt, 100), known);
    EXPECT_EQ(choice.OnEarlySegment(known.all().front(), /*is_recorded=*/true, known), 0u);
    EXPECT_EQ(choice.OnEarlySegment(known.all().front(), /*is_recorded=*/true, known),
              std::nullopt);
    choice.OnBegin(/*signature=*/7);
    choice.Learn(choice.TakeRan(), EarlyPart(input_bytes, 10), known);
    ASSERT_THAT(known.all(), SizeIs(1));
    EXPECT_EQ(known.all().front()->plan().step_us, input_bytes == 40 ? 10 : 100);
  }
}

TEST(SegmentChoice, AMixIsTriedOnTopOfWhatIsComputedAgainAnyhow) {
  SegmentChoice choice;
  choice.OnBegin(/*signature=*/1);
  choice.Try(Known({1}, 10, {true, false, false, false}, {2}));
  EXPECT_THAT(Kept(choice, 4), ElementsAre(false, true, false, true));
}

// A step of `known` that tries its mix, and what was planned of its record.
void TryMix(SegmentChoice& choice, KnownSteps& known, const KnownPtr& recorded) {
  choice.OnBegin(/*signature=*/1);
  choice.Try(known.all().front());
  choice.Learn(choice.TakeRan(), recorded, known);
}

TEST(SegmentChoice, AMixThatMakesTheStepShorterTakesItsPlace) {
  SegmentChoice choice;
  KnownSteps known;
  choice.Learn({}, Known({1, 2}, 100, {false, false}, {1}), known);
  TryMix(choice, known, Known({1}, 90, {false, true}, {0}));
  ASSERT_THAT(known.all(), SizeIs(1));
  EXPECT_EQ(known.all().front()->plan().step_us, 90);
  EXPECT_THAT(known.all().front()->mix(), IsEmpty()) << "one try is enough";
}

// An update behind the last micro-batch, for example.
TEST(SegmentChoice, WhatATrialDoesBehindItsLastUseSaysNothingOfItsMix) {
  const KnownPtr with = Known({1}, 90, {false, true}, {0});
  StepRecord step = with->step();
  step.stretches.back().compute_us += 1000;
  SegmentChoice choice;
  KnownSteps known;
  choice.Learn({}, Known({1, 2}, 100, {false, false}, {1}), known);
  TryMix(choice, known,
         std::make_shared<const KnownStep>(
             std::move(step), StepPlan{.moves = {}, .peak_bytes = 0, .step_us = 1090}));
  ASSERT_THAT(known.all(), SizeIs(1));
  EXPECT_EQ(known.all().front()->plan().step_us, 1090);
}

TEST(SegmentChoice, AMixThatDoesNotIsForgottenAndNotTriedAgain) {
  const absl::Status shortfall = absl::ResourceExhaustedError("too little");
  for (const KnownPtr& with :
       {Known({1}, 110, {false, true}), Known({1}, 90, {false, true}, {}, shortfall)}) {
    SegmentChoice choice;
    KnownSteps known;
    choice.Learn({}, Known({1, 2}, 100, {false, false}, {1}), known);
    TryMix(choice, known, with);
    ASSERT_THAT(known.all(), SizeIs(1));
    EXPECT_EQ(known.all().front()->plan().step_us, 100);
    EXPECT_THAT(known.all().front()->mix(), IsEmpty());
    // The step is recorded once more.
    const KnownPtr again = Known({1, 2}, 101, {false, false});
    EXPECT_FALSE(choice.MayMix({}, again->step(), known));
    choice.Learn({}, again, known);
    ASSERT_THAT(known.all(), SizeIs(1));
    EXPECT_EQ(known.all().front()->plan().step_us, 101);
    EXPECT_FALSE(choice.MayMix({}, again->step(), known));
  }
}

TEST(SegmentChoice, AMixIsLookedForOnceAStepHasRunAsPlanned) {
  SegmentChoice choice;
  KnownSteps known;
  const KnownPtr first = Known({1, 2}, 100, {false, false});
  EXPECT_FALSE(choice.MayMix({}, first->step(), known)) << "its times are those of a first step";
  choice.Learn({}, first, known);
  EXPECT_TRUE(choice.MayMix({}, first->step(), known));
  EXPECT_FALSE(choice.MayMix({.tried = first, .computed_again = {}}, first->step(), known));
  StepRecord by_host = first->step();
  by_host.timed_by_host = true;
  EXPECT_FALSE(choice.MayMix({}, by_host, known));
}

TEST(SegmentChoice, ATrialThatWasAnotherStepSaysNothing) {
  SegmentChoice choice;
  KnownSteps known;
  choice.Learn({}, Known({1, 2}, 100, {false, false}, {1}), known);
  for (int i = 1; i < SegmentChoice::kMaxTries; ++i) {
    TryMix(choice, known, Known({1}, 10, {false}));  // it ends after one segment
    ASSERT_THAT(known.all(), SizeIs(1));
    EXPECT_EQ(known.all().front()->plan().step_us, 100);
    EXPECT_THAT(known.all().front()->mix(), ElementsAre(1)) << "it may still be tried";
  }
  TryMix(choice, known, Known({1}, 10, {false}));
  ASSERT_THAT(known.all(), SizeIs(1));
  EXPECT_EQ(known.all().front()->plan().step_us, 100);
  EXPECT_THAT(known.all().front()->mix(), IsEmpty());
}

// A step that begins with a segment, whose input has so many bytes, and saves something outside.
KnownPtr Early(double step_us, uint64_t input_bytes, uint64_t outside_bytes, bool again) {
  StepRecord step = ForwardAndBackward(100, {1, 2});
  step.objects[0].size_bytes = input_bytes;
  step.objects[1].size_bytes = outside_bytes;
  step.early_segments = 1;
  StepSegment& segment = step.segments.emplace_back();
  segment.computed_again = again;
  if (!again) segment.uses = {0, 3};
  if (!again) segment.inputs = {0};
  return std::make_shared<const KnownStep>(
      std::move(step), StepPlan{.moves = {}, .peak_bytes = 0, .step_us = step_us}, absl::OkStatus(),
      again ? std::vector<uint32_t>() : std::vector<uint32_t>{0});
}

TEST(SegmentChoice, ATrialThatBeganWithASegmentWasTheStepIfItSavedTheSameInputAndTheSameOutside) {
  struct Case {
    KnownPtr recorded;
    double left_us;
  };
  for (const Case& trial :
       {Case{Early(10, 300, 40, /*again=*/true), 10}, Case{Early(10, 299, 40, /*again=*/true), 100},
        Case{Early(10, 300, 41, /*again=*/true), 100}}) {
    SegmentChoice choice;
    KnownSteps known;
    choice.Learn({}, Early(100, 300, 40, /*again=*/false), known);
    EXPECT_EQ(choice.OnEarlySegment(known.all().front(), /*is_recorded=*/true, known),
              std::nullopt);
    choice.OnBegin(/*signature=*/7);
    choice.Learn(choice.TakeRan(), trial.recorded, known);
    ASSERT_THAT(known.all(), SizeIs(1));
    EXPECT_EQ(known.all().front()->plan().step_us, trial.left_us);
  }
}

TEST(SegmentChoice, StepsThatBeginAlikeAndThenDifferAreNotMixed) {
  SegmentChoice choice;
  KnownSteps known;
  const KnownPtr mixed = Known({1, 2}, 90, {true, false});
  choice.OnBegin(/*signature=*/1);
  EXPECT_EQ(choice.Follow(mixed), nullptr);
  EXPECT_THAT(Kept(choice, 1), ElementsAre(false));
  EXPECT_EQ(choice.Follow(nullptr), mixed) << "another step: it is to be forgotten";
  const KnownPtr plain = Known({1, 2}, 100, {false, false});
  choice.Learn({}, plain, known);
  EXPECT_FALSE(choice.MayMix({}, plain->step(), known));
  const KnownPtr other = Known({7, 2}, 100, {false, false});
  choice.Learn({}, other, known);
  EXPECT_TRUE(choice.MayMix({}, other->step(), known)) << "it begins otherwise";
  // One whose mix was found before is not run with it.
  EXPECT_FALSE(choice.MayTry(*Known({1, 2}, 100, {false, false}, {0}), known));
  EXPECT_TRUE(choice.MayTry(*Known({7, 2}, 100, {false, false}, {0}), known));
}

TEST(SegmentChoice, AMixIsStillToBeLookedForWhereAnotherStepBeganAlike) {
  SegmentChoice choice;
  KnownSteps known;
  const KnownPtr step = Known({1, 2}, 100, {false, false});
  const KnownPtr alike = Known({1, 3}, 100, {false, false});
  choice.Learn({}, step, known);
  choice.Learn({}, alike, known);
  choice.Learn({}, step, known);
  EXPECT_FALSE(known.AnyWantsMix());
  known.Forget(*alike);
  EXPECT_TRUE(known.AnyWantsMix());
  choice.Learn({}, step, known);
  EXPECT_FALSE(known.AnyWantsMix());
}

TEST(SegmentChoice, AStepThatWasLostBeforeAnythingWasComputedAgainIsMixedAsEver) {
  SegmentChoice choice;
  KnownSteps known;
  const KnownPtr mixed = Known({1, 2}, 90, {false, true});
  choice.OnBegin(/*signature=*/1);
  choice.Follow(mixed);
  Kept(choice, 1);
  EXPECT_EQ(choice.Follow(nullptr), nullptr);
}

TEST(KnownSteps, AStepThatAddsToGradientsIsNotTheOneThatMakesThem) {
  KnownSteps known;
  const KnownPtr makes = Known({1, 2}, 10);
  const KnownPtr adds = WithGradients(makes);
  const auto any = [](const KnownStep&) { return true; };
  known.Learn(makes);
  known.set_begins_with_gradients(true);
  EXPECT_EQ(known.Find(any), makes) << "until one like it is known";
  EXPECT_EQ(known.Likeliest(), makes);
  known.Learn(adds);
  EXPECT_THAT(known.all(), SizeIs(2));
  EXPECT_EQ(known.Find(any), adds);
  EXPECT_FALSE(known.MayBe(*makes));
  known.set_begins_with_gradients(false);
  EXPECT_EQ(known.Find(any), makes);
  EXPECT_EQ(known.Likeliest(), makes);
  known.Forget(*makes);
  EXPECT_EQ(known.Find(any), nullptr) << "that takes less";
}

TEST(SegmentChoice, TheMixOfAStepThatMakesGradientsIsNotTriedByOneThatAddsToThem) {
  SegmentChoice choice;
  KnownSteps known;
  const KnownPtr makes = Known({1, 2}, 100, {false, false}, {0});
  known.Learn(makes);
  EXPECT_TRUE(choice.MayTry(*makes, known));
  known.set_begins_with_gradients(true);
  EXPECT_FALSE(choice.MayTry(*makes, known));
}

TEST(KnownSteps, StepsThatBeginAlikeMayBeMixedWhereTheirGradientsTell) {
  KnownSteps known;
  const KnownPtr makes = Known({1, 2}, 10, {false, false});
  known.Learn(makes);
  known.Learn(WithGradients(Known({1, 3}, 10, {false, false})));
  EXPECT_TRUE(known.MayMix(makes->step()));
  EXPECT_TRUE(known.AnyWantsMix());
}

// Such a one may never come again.
TEST(KnownSteps, NobodyRecordsForTheMixOfAStepThatDoesNotBegin) {
  KnownSteps known;
  const KnownPtr makes = Known({1, 2}, 10, {false, false});
  known.Learn(makes);
  known.Learn(WithGradients(makes)->WithMixTried());  // that one does not
  EXPECT_TRUE(known.AnyWantsMix());
  known.set_begins_with_gradients(true);
  EXPECT_FALSE(known.AnyWantsMix());
}

TEST(KnownSteps, WhatIsLikeAKnownStepTakesItsPlace) {
  KnownSteps known;
  known.Learn(Known({1}, 10));
  known.Learn(Known({2}, 20));
  known.Learn(Known({1}, 30));
  ASSERT_THAT(known.all(), SizeIs(2));
  EXPECT_EQ(known.all().front()->plan().step_us, 30);
  EXPECT_EQ(known.FindLike(Known({2}, 0)->step())->plan().step_us, 20);
  EXPECT_EQ(known.FindLike(Known({3}, 0)->step()), nullptr);
  known.Forget(*known.all().front());
  ASSERT_THAT(known.all(), SizeIs(1));
  EXPECT_EQ(known.all().front()->plan().step_us, 20);
}

TEST(KnownSteps, TheStepThatCameNextTheLastTimeIsLookedAtFirst) {
  KnownSteps known;
  const KnownPtr a = Known({1}, 10), b = Known({2}, 20), c = Known({3}, 30);
  for (const KnownPtr& step : {a, b, c}) known.Learn(step);
  const auto run = [&](const KnownPtr& step) {
    known.OnBegin();
    const KnownPtr first = known.all().front();
    known.Find([&](const KnownStep& one) { return &one == step.get(); });
    known.OnEnd(step.get());
    return first;
  };
  for (const KnownPtr& step : {a, b, c, a}) run(step);
  EXPECT_EQ(run(b), b);
  EXPECT_EQ(run(c), c);
  EXPECT_EQ(run(a), a);
}

TEST(KnownSteps, WhatCameAfterAStepThatNobodyKnowsIsLookedAtFirstAfterAnother) {
  KnownSteps known;
  const KnownPtr a = Known({1}, 10), b = Known({2}, 20);
  for (const KnownPtr& step : {a, b}) known.Learn(step);
  for (const KnownPtr& step : {KnownPtr(), a, b, KnownPtr()}) {
    known.OnBegin();
    known.Find([&](const KnownStep& one) { return &one == step.get(); });
    known.OnEnd(step.get());
  }
  ASSERT_EQ(known.all().front(), b);
  known.OnBegin();
  EXPECT_EQ(known.all().front(), a);
}

}  // namespace
}  // namespace pinion::testing
