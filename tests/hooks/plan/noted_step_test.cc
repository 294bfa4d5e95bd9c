// Checks the record made from the noted entries of a step, which are written by hand.

#include "pinion/hooks/plan/noted_step.h"

#include <ATen/ops/empty.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/stream/stream_clock.h"
#include "pinion/hooks/autograd/saved_version.h"
#include "pinion/hooks/plan/device_peaks.h"

namespace pinion::testing {
namespace noted_step_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kSize = 1024;

// An object whose last handle is released after `uses_at_release` uses of all objects.
NotedObject Object(size_t first_use, size_t uses_at_release) {
  return {.planned = {.size_bytes = kSize, .frees = true},
          .version = SavedVersion(at::empty({1})),
          .extent = {},
          .storage_bytes = kSize,
          .first_use = first_use,
          .last_save = first_use,
          .uses_at_release = uses_at_release};
}
NotedEntry Used(uint32_t object, uint64_t by) { return {.used = object, .by = by}; }

StepTrace Record(const std::vector<NotedEntry>& entries, const std::vector<NotedObject>& objects,
                 const std::vector<NotedInput>& inputs = {}) {
  return StepOf(entries, objects, inputs, {.us = std::vector<double>(2 * entries.size())});
}

// Returns the released bytes when `gone_bytes` of two objects are freed. One is released after its
// operator's last use and before the peak.
uint64_t ReleasedBytes(uint64_t first_by, int64_t gone_bytes) {
  std::vector<NotedObject> objects = {Object(0, 2), Object(1, 2)};
  objects[1].storage = 1;
  std::vector<NotedEntry> entries = {{}, Used(0, first_by), Used(1, /*by=*/7), {}, {}};
  entries[2].object_bytes = 2 * kSize;
  entries[3].released = 0;
  entries[3].object_bytes = 2 * kSize - gone_bytes;
  entries[4].peak_other_bytes = 10 * kSize;
  return Record(entries, objects).intervals.back().released_bytes;
}

TEST(NotedStep, WhatAnOperatorHasUsedIsReleasedUntilItsNextUse) {
  EXPECT_EQ(ReleasedBytes(/*first_by=*/7, kSize), kSize);
}

TEST(NotedStep, WhatAnotherOperatorHasUsedDoesNotCountAsReleasedByThisOne) {
  EXPECT_EQ(ReleasedBytes(/*first_by=*/6, kSize), 0u);
}

TEST(NotedStep, WhatSomebodyElseStillHasIsNotReleased) {
  EXPECT_EQ(ReleasedBytes(/*first_by=*/7, 0), 0u);
}

TEST(NotedStep, OfAStorageWhoseLastPartIsNotSavedYetTheRestCounts) {
  std::vector<NotedObject> parts = {Object(0, 3), Object(2, 3)};
  for (NotedObject& part : parts) part.storage_bytes = 4 * kSize;
  parts.push_back(Object(1, 3));
  parts.back().storage = 1;
  const StepTrace step = Record({{}, Used(0, 1), Used(2, 2), Used(1, 3), {}}, parts);
  std::vector<uint64_t> other_bytes;
  for (const StepInterval& interval : step.intervals) other_bytes.push_back(interval.other_bytes);
  EXPECT_THAT(other_bytes, ElementsAre(3 * kSize, 3 * kSize, 0, 0));
}

// Returns the entries by which two objects have gone, of which the last takes `last_bytes`. They
// are freed in their order; a peak follows each, and what nobody notes and is freed behind them.
std::vector<size_t> GoneBy(int64_t last_bytes, const std::vector<int64_t>& later_peaks) {
  const char memory[3] = {};
  NotedObject first = Object(0, 0), last = Object(0, 0);
  last.storage_bytes = last_bytes;
  first.data = &memory[0];
  last.data = &memory[1];
  DevicePeaks::Since since = {.peak_bytes = 8 * kSize};
  for (size_t i = 0; i < later_peaks.size(); ++i) {
    since.freed.push_back({.data = &memory[i], .later_peak_bytes = later_peaks[i]});
  }
  NotedObject* const gone[] = {&first, &last};
  NoteGone(since, gone, /*entry=*/5);
  return {first.gone_by, last.gone_by};
}

// The first freed object counts as held only if it fits at all later peaks.
TEST(NotedStep, APeakAfterWhatNobodyNotesCountsForTheLastObjectThatHasGone) {
  EXPECT_THAT(GoneBy(kSize, {0, 0, 7 * kSize + 1}), ElementsAre(5, 5));
}

TEST(NotedStep, WhereOnlyTheFirstFitsBesideTheLaterPeakItAloneIsHeld) {
  EXPECT_THAT(GoneBy(4 * kSize, {0, 5 * kSize}), ElementsAre(0, 5));
}

// -------------------------------------------------------------------------------- what was freed

struct Freed {
  int64_t size_bytes = 0;
  int64_t later_peak_bytes = 0;  // from the free on, until the next one
};

// Returns whether the objects, in the order of their frees, count as held until the next moment.
std::vector<bool> CountAsHeld(int64_t peak_bytes, const std::vector<Freed>& freed) {
  const std::vector<char> memory(freed.size());
  std::vector<NotedObject> objects;
  std::vector<NotedObject*> gone;
  DevicePeaks::Since since = {.peak_bytes = peak_bytes};
  for (size_t i = 0; i < freed.size(); ++i) {
    objects.push_back(Object(0, 0));
    objects.back().storage_bytes = static_cast<uint64_t>(freed[i].size_bytes);
    objects.back().data = &memory[i];
    since.freed.push_back({.data = &memory[i], .later_peak_bytes = freed[i].later_peak_bytes});
  }
  for (NotedObject& object : objects) gone.push_back(&object);
  NoteGone(since, gone, /*entry=*/5);
  std::vector<bool> held;
  for (const NotedObject& object : objects) held.push_back(object.gone_by == 0);
  return held;
}

TEST(NotedStep, WhatGoesBehindThePeakCountsAsHeldToTheEnd) {
  EXPECT_THAT(CountAsHeld(100, {{.size_bytes = 30, .later_peak_bytes = 70}}), ElementsAre(true));
}

TEST(NotedStep, WhatOthersTakeThePlaceOfDoesNotCountAsHeld) {
  EXPECT_THAT(CountAsHeld(100, {{.size_bytes = 30, .later_peak_bytes = 71}}), ElementsAre(false));
}

TEST(NotedStep, WhatGoesTogetherCountsAsHeldTogether) {
  EXPECT_THAT(CountAsHeld(100, {{30, 70}, {30, 40}, {30, 10}}), ElementsAre(true, true, true));
}

// The peak came after the first was freed and before the second.
TEST(NotedStep, ALaterOneCountsAsHeldWhereAnEarlierOneDoesNot) {
  EXPECT_THAT(CountAsHeld(100, {{30, 100}, {30, 70}}), ElementsAre(false, true));
}

// Whichever objects could have stayed, the count covers all bytes that would have been in use. It
// counts the peak and all objects not counted as held.
TEST(NotedStep, WhatCountsIsNeverLessThanWhatWouldHaveBeenThere) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    std::vector<Freed> gone(1 + random() % 5);
    for (Freed& object : gone) {
      object.size_bytes = 1 + random() % 20;
      object.later_peak_bytes = 20 + random() % 81;
    }
    const std::vector<bool> held = CountAsHeld(100, gone);
    for (uint32_t stays = 0; stays < 1U << gone.size(); ++stays) {
      int64_t counted_bytes = 100;
      int64_t used_bytes = 100;
      for (size_t i = 0; i < gone.size(); ++i) {
        if ((stays >> i & 1) != 0 && !held[i]) counted_bytes += gone[i].size_bytes;
      }
      int64_t stayed_bytes = 0;  // of objects freed up to here
      for (size_t i = 0; i < gone.size(); ++i) {
        if ((stays >> i & 1) != 0) stayed_bytes += gone[i].size_bytes;
        used_bytes = std::max(used_bytes, gone[i].later_peak_bytes + stayed_bytes);
      }
      EXPECT_GE(counted_bytes, used_bytes) << stays;
    }
  }
}

// ------------------------------------------------------------------------------------- segments

NotedEntry BeginsSegment(uint32_t ordinal) { return {.begins = ordinal, .other_bytes = 5 * kSize}; }
NotedEntry UsedInSegment(uint32_t object, uint32_t ordinal) {
  NotedEntry entry = Used(object, /*by=*/1);
  entry.part = {.device = c10::kCPU, .ordinal = ordinal};
  return entry;
}
// An input of the segment with `object`'s bytes.
NotedInput InputLike(const NotedObject& object, uint32_t segment, size_t begin = 0) {
  return {.segment = segment,
          .storage = object.storage,
          .version = object.version,
          .extent = object.extent,
          .begin = begin};
}
// Returns the other bytes before a segment that begins and then saves `object` first.
uint64_t BytesBeforeSegment(const NotedObject& object, const std::vector<NotedInput>& inputs = {}) {
  const StepTrace step = Record({{}, BeginsSegment(0), UsedInSegment(0, 0), {}}, {object}, inputs);
  return step.segments.at(0).before.value().other_bytes;
}

TEST(NotedStep, WhatASegmentSavesFirstCountsBeforeItUntilItIsSaved) {
  EXPECT_EQ(BytesBeforeSegment(Object(0, 1)), 6 * kSize);
}

TEST(NotedStep, WhatASegmentSavesFirstDoesNotCountBeforeItIfItIsItsInput) {
  const NotedObject input = Object(0, 1);
  EXPECT_EQ(BytesBeforeSegment(input, {InputLike(input, 0)}), 5 * kSize);
}

TEST(NotedStep, ASegmentInWhichAnotherThreadSavesFirstWasNotSeenToBegin) {
  const std::vector<NotedObject> objects = {Object(0, 2), Object(1, 2)};
  const StepTrace step =
      Record({{}, BeginsSegment(0), Used(0, /*by=*/2), UsedInSegment(1, 0), {}}, objects);
  EXPECT_THAT(step.segments.at(0).accesses, ElementsAre(1));
  EXPECT_FALSE(step.segments[0].before.has_value());
}

TEST(NotedStep, AnInputThatIsSavedBeforeItsSegmentAndStillHeldIsThatObject) {
  std::vector<NotedObject> objects = {Object(0, /*uses_at_release=*/0), Object(1, 2)};
  objects[0].handles = 1;
  objects[1].storage = 1;
  const StepTrace step = Record({{}, Used(0, /*by=*/2), BeginsSegment(0), UsedInSegment(1, 0), {}},
                                objects, {InputLike(objects[0], 0, /*begin=*/1)});
  EXPECT_THAT(step.segments.at(0).inputs, ElementsAre(0));
  EXPECT_THAT(step.unsaved_inputs, IsEmpty());
}

TEST(NotedStep, TwoSegmentsThatNeedTheSameHaveOneUnsavedInput) {
  const std::vector<NotedObject> objects = {Object(0, 2), Object(1, 2)};
  NotedObject other = Object(0, 0);
  other.storage = 9;
  const StepTrace step =
      Record({{}, BeginsSegment(0), UsedInSegment(0, 0), BeginsSegment(1), UsedInSegment(1, 1), {}},
             objects, {InputLike(other, 0), InputLike(other, 1, /*begin=*/1)});
  EXPECT_THAT(step.segments.at(0).inputs, ElementsAre(2));
  EXPECT_THAT(step.segments.at(1).inputs, ElementsAre(2));
  EXPECT_EQ(step.unsaved_inputs.size(), 1u);
}

TEST(NotedStep, OfTwoUnsavedInputsASegmentNeedsTheOneThatItHas) {
  const std::vector<NotedObject> objects = {Object(0, 2), Object(1, 2)};
  NotedObject first = Object(0, 0), second = Object(0, 0);
  first.storage = 8;
  second.storage = 9;
  const StepTrace step = Record(
      {{}, BeginsSegment(0), UsedInSegment(0, 0), BeginsSegment(1), UsedInSegment(1, 1), {}},
      objects, {InputLike(first, 0), InputLike(second, 0), InputLike(second, 1, /*begin=*/1)});
  EXPECT_THAT(step.segments.at(0).inputs, ElementsAre(2, 3));
  EXPECT_THAT(step.segments.at(1).inputs, ElementsAre(3));
}

// ------------------------------------------------------------------------- what is cast again

// Of three objects that can be, one was: its two reads took 80 and 50 us.
TEST(NotedStep, WhatNobodyHasCastAgainTakesAsLongForAByteAsWhatSomebodyHas) {
  std::vector<NotedObject> objects = {Object(0, 5), Object(1, 5), Object(2, 5)};
  for (size_t i = 0; i < objects.size(); ++i) {
    objects[i].storage = i;
    objects[i].is_computed_again = i > 0;
  }
  objects[2].planned.size_bytes = 3 * kSize;
  std::vector<NotedEntry> entries = {{},         Used(0, 1), Used(1, 2), Used(2, 3),
                                     Used(1, 4), Used(1, 5), {}};
  std::vector<double> times(2 * entries.size());
  for (size_t i = 0; i < times.size(); ++i) times[i] = static_cast<double>(i / 2) * 1000;
  for (const auto& [entry, us] : {std::pair(4, 80), std::pair(5, 50)}) {
    entries[entry].computed_again = true;
    times[2 * entry + 1] += us;
  }
  const StepTrace step = StepOf(entries, objects, {}, {.us = times});
  EXPECT_EQ(step.objects[0].recast_us, std::nullopt);
  EXPECT_EQ(step.objects[1].recast_us, 50);
  EXPECT_EQ(step.objects[2].recast_us, 150);
}

}  // namespace noted_step_test
}  // namespace pinion::testing
