// Streamed weights never exceed their window, are prefetched in time, and are copied no more often
// than the best eviction order requires.

#include "pinion/engine/schedule/weight_prefetcher.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

// Executes the requested copies and evictions, and checks that each was possible.
class Shelf {
 public:
  Shelf(std::vector<uint64_t> sizes_bytes, uint64_t window_bytes)
      : sizes_(sizes_bytes), window_bytes_(window_bytes), schedule_({sizes_bytes, window_bytes}) {}

  PrefetchPlan Use(uint32_t object) {
    const PrefetchPlan plan =
        schedule_.OnUse(object, [this](uint32_t n) { return !kept_.contains(n); });
    was_here_ = std::ranges::count(plan.fetches, object) == 0;
    Execute(plan);
    EXPECT_TRUE(here_.contains(object));
    uint64_t bytes = 0;
    for (const uint32_t n : here_) bytes += sizes_[n];
    EXPECT_EQ(bytes, schedule_.resident_bytes());
    if (kept_.empty()) {
      EXPECT_LE(bytes, window_bytes_);
    }
    return plan;
  }
  PrefetchPlan Used(uint32_t object) { return Execute(schedule_.OnUsed(object, MayEvict)); }
  void Drop(uint32_t object) {
    schedule_.OnEvicted(object);
    here_.erase(object);
  }
  PrefetchPlan Change() { return Execute(schedule_.OnChange(MayEvict)); }
  // Returns how many of these accesses found their object not resident.
  int Late(const std::vector<uint32_t>& uses, int rounds = 1) {
    int late = 0;
    for (int round = 0; round < rounds; ++round) {
      for (const uint32_t object : uses) {
        Use(object);
        late += was_here_ ? 0 : 1;
      }
    }
    return late;
  }
  void Keep(uint32_t object) { kept_.insert(object); }
  void SetWindow(uint64_t window_bytes) {
    window_bytes_ = window_bytes;
    schedule_.set_window_bytes(window_bytes);
  }
  // Returns the fetches since the last call.
  int TakeFetches() { return std::exchange(fetches_, 0); }
  // Returns the fetches of as many rounds.
  int FetchesOf(const std::vector<uint32_t>& uses, int rounds = 1) {
    TakeFetches();
    Late(uses, rounds);
    return TakeFetches();
  }
  WeightPrefetcher& schedule() { return schedule_; }
  const std::set<uint32_t>& here() const { return here_; }

 private:
  static bool MayEvict(uint32_t) { return true; }
  PrefetchPlan Execute(const PrefetchPlan& plan) {
    for (const uint32_t n : plan.evictions) EXPECT_EQ(here_.erase(n), 1u) << n << " was not there";
    for (const uint32_t n : plan.fetches) EXPECT_TRUE(here_.insert(n).second) << n << " was there";
    fetches_ += static_cast<int>(plan.fetches.size());
    return plan;
  }

  const std::vector<uint64_t> sizes_;
  uint64_t window_bytes_;
  WeightPrefetcher schedule_;
  std::set<uint32_t> here_;
  std::set<uint32_t> kept_;
  bool was_here_ = false;
  int fetches_ = 0;
};

std::vector<uint32_t> ForwardAndBackward(uint32_t layers) {
  std::vector<uint32_t> uses;
  for (uint32_t n = 0; n < layers; ++n) uses.push_back(n);
  for (uint32_t n = layers; n-- > 0;) uses.push_back(n);
  return uses;
}

std::vector<uint32_t> Pass(uint32_t layers) {
  std::vector<uint32_t> uses(layers);
  std::iota(uses.begin(), uses.end(), 0);
  return uses;
}

std::vector<uint64_t> Equal(size_t layers, uint64_t size_bytes = 1) {
  return std::vector<uint64_t>(layers, size_bytes);
}

TEST(WeightPrefetcher, TheFirstStepFetchesEachObjectWhenItIsUsed) {
  Shelf shelf({1, 1, 1, 1}, 2);
  EXPECT_EQ(shelf.Late({0, 1, 2, 3}), 4);
  EXPECT_THAT(shelf.here(), ElementsAre(2, 3)) << "the turn finds what was used last";
  EXPECT_EQ(shelf.Late({3, 2, 1, 0}), 2);
}

TEST(WeightPrefetcher, ALaterStepHasWhatItUsesBeforehand) {
  Shelf shelf(Equal(8), 2);
  const std::vector<uint32_t> step = ForwardAndBackward(8);
  shelf.Late(step);
  // The second access reveals where a step begins.
  EXPECT_LE(shelf.Late(step), 1);
  EXPECT_EQ(shelf.Late(step), 0);
  shelf.TakeFetches();
  EXPECT_EQ(shelf.Late(step), 0);
  EXPECT_EQ(shelf.TakeFetches(), 12) << "both turns keep two of the eight";
}

TEST(WeightPrefetcher, InferenceKeepsAllWhereTheWindowHasRoom) {
  Shelf shelf(Equal(4), 4);
  shelf.Late({0, 1, 2, 3}, 3);
  EXPECT_EQ(shelf.TakeFetches(), 4) << "what fits stays";
}

TEST(WeightPrefetcher, InferenceKeepsAShareAndFetchesTheRestInTime) {
  const std::vector<uint32_t> pass = Pass(24);
  for (const int window : {2, 3, 4, 12, 13, 14, 17, 23}) {
    Shelf shelf(Equal(24, 5), 5 * static_cast<uint64_t>(window));
    shelf.Late(pass, 5);
    shelf.TakeFetches();
    constexpr int kRounds = 23;
    EXPECT_EQ(shelf.Late(pass, kRounds), 0) << "window " << window;
    // The object in use and the next one do not stay in the window.
    double expected = 24 - (window - 2);
    if (2 * (window - 2) >= 24) {
      // An object is absent from the following access until `ahead` accesses before its next.
      const int ahead = (24 + 24 - window) / (24 - (window - 1));
      expected = 24.0 * (24 - window) / (23 - ahead);
    }
    EXPECT_NEAR(static_cast<double>(shelf.TakeFetches()) / kRounds, expected, 0.1) << window;
  }
}

// Returns the average time of a loop's round. A byte takes 1 to compute and `copy` to be copied in.
double TimeOfRound(const std::vector<uint64_t>& sizes_bytes, uint64_t window_bytes, double copy) {
  WeightPrefetcher schedule({sizes_bytes, window_bytes});
  std::vector<double> here(sizes_bytes.size()), used(sizes_bytes.size());
  double now = 0;
  double link = 0;
  const auto execute = [&](const PrefetchPlan& plan) {
    double room = 0;
    for (const uint32_t object : plan.evictions) room = std::max(room, used[object]);
    for (const uint32_t object : plan.fetches) {
      here[object] = link = std::max(link, room) + copy * static_cast<double>(sizes_bytes[object]);
    }
  };
  const auto may_evict = [](uint32_t) { return true; };
  constexpr int kRounds = 60, kFirst = 14;
  double begin = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (round == kFirst) begin = now;
    for (uint32_t object = 0; object < sizes_bytes.size(); ++object) {
      execute(schedule.OnUse(object, may_evict));
      now = std::max(now, here[object]) + static_cast<double>(sizes_bytes[object]);
      used[object] = now;
      execute(schedule.OnUsed(object, may_evict));
    }
  }
  return (now - begin) / (kRounds - kFirst);
}

// Returns a round's time for 24 equal objects, relative to the longer of compute and fewest copies.
double TimeOverBound(int window, double copy) {
  constexpr int kObjects = 24;
  const double fewest = kObjects * (kObjects - window + 1.0) / (kObjects - 1);
  const double time = TimeOfRound(Equal(kObjects), static_cast<uint64_t>(window), copy);
  return time / std::max<double>(kObjects, fewest * copy);
}

TEST(WeightPrefetcher, InferenceIsNearItsBoundHoweverFastTheLinkIs) {
  for (int window = 2; window <= 22; ++window) {
    double most = 0;
    double slow_link = 0;
    for (int hundredths = 50; hundredths <= 1200; hundredths += 7) {
      slow_link = TimeOverBound(window, hundredths / 100.0);
      most = std::max(most, slow_link);
    }
    // The worst case is a copy that takes exactly the time available on average.
    EXPECT_LE(most, window < 9 ? 1.105 : 1.065) << "window " << window;
    EXPECT_LE(slow_link, 1.05) << "window " << window;
  }
}

TEST(WeightPrefetcher, NothingIsLateBehindTheRoundsThatTeachALoop) {
  const std::vector<uint32_t> pass = Pass(24);
  for (int window = 2; window <= 24; ++window) {
    Shelf shelf(Equal(24), static_cast<uint64_t>(window));
    shelf.Late(pass, 2);
    EXPECT_EQ(shelf.Late(pass, 10), 0) << "window " << window;
  }
}

// Runs a loop in each of the windows in turn. Returns the bytes fetched per round in the last.
double BytesOfRound(const std::vector<uint64_t>& sizes_bytes,
                    const std::vector<uint64_t>& windows_bytes) {
  WeightPrefetcher schedule({sizes_bytes, windows_bytes.front()});
  const auto may_evict = [](uint32_t) { return true; };
  constexpr int kRounds = 24;
  uint64_t fetched_bytes = 0;
  for (const uint64_t window_bytes : windows_bytes) {
    schedule.set_window_bytes(window_bytes);
    for (int round = -12; round < kRounds; ++round) {
      if (round == 0) fetched_bytes = 0;
      for (uint32_t object = 0; object < sizes_bytes.size(); ++object) {
        for (const uint32_t fetched : schedule.OnUse(object, may_evict).fetches) {
          fetched_bytes += sizes_bytes[fetched];
        }
        for (const uint32_t fetched : schedule.OnUsed(object, may_evict).fetches) {
          fetched_bytes += sizes_bytes[fetched];
        }
      }
    }
  }
  return static_cast<double>(fetched_bytes) / kRounds;
}

TEST(WeightPrefetcher, AWindowThatHasChangedIsUsedLikeOneThatWasThereFromTheStart) {
  for (const uint64_t count : {6, 12, 24}) {
    const std::vector<uint64_t> sizes(count, 1);
    for (uint64_t window = 2; window <= count; ++window) {
      const double alone = BytesOfRound(sizes, {window});
      for (uint64_t before = 2; before <= count + 1; ++before) {
        EXPECT_NEAR(BytesOfRound(sizes, {before, window}), alone, 0.4)
            << count << " objects, window " << before << ", then " << window;
      }
    }
  }
}

// The layers of a language model, with an embedding and a head.
std::vector<uint64_t> LanguageModel(size_t layers, uint64_t layer_bytes, uint64_t embedding_bytes) {
  std::vector<uint64_t> sizes(layers + 2, layer_bytes);
  sizes.front() = sizes.back() = embedding_bytes;
  return sizes;
}

TEST(WeightPrefetcher, AnEmbeddingAndAHeadStaySoThatLayersAloneNeedRoomToComeAndGo) {
  const std::vector<uint64_t> sizes = LanguageModel(24, 10, 60);
  for (uint64_t window = 160; window < 340; window += 10) {
    const double layers_away = static_cast<double>(360 - (window - 3 * 10));
    EXPECT_LE(BytesOfRound(sizes, {window}), layers_away) << window;
  }
}

TEST(WeightPrefetcher, ALanguageModelIsNoSlowerInALargerWindow) {
  for (const size_t layers : {12, 24}) {
    for (const uint64_t embedding : {20, 40, 60, 100}) {
      const std::vector<uint64_t> sizes = LanguageModel(layers, 10, embedding);
      const uint64_t all = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
      double least = static_cast<double>(4 * all);
      for (uint64_t window = 2 * embedding; window < all; window += 5) {
        const double time = TimeOfRound(sizes, window, 4);
        EXPECT_LE(time, 1.05 * least)
            << layers << " layers, embedding " << embedding << ", window " << window;
        least = std::min(least, time);
      }
    }
  }
}

TEST(WeightPrefetcher, UnequalObjectsFetchNoMoreInALargerWindow) {
  std::vector<std::vector<uint64_t>> models;
  auto& conv = models.emplace_back();
  for (const uint64_t size : {4, 16, 64, 256}) conv.insert(conv.end(), 4, size);
  auto& unet = models.emplace_back();
  for (const uint64_t size : {4, 16, 64, 256, 64, 16, 4}) unet.insert(unet.end(), 3, size);
  models.push_back(LanguageModel(24, 10, 60));
  auto& experts = models.emplace_back();
  for (uint64_t n = 0; n < 33; ++n) experts.push_back(n % 7 == 3 ? 80 : 1 + n * 5 % 10);
  std::mt19937 random(3);
  for (int model = 0; model < 40; ++model) {
    auto& drawn = models.emplace_back();
    for (int n = 0; n < 16; ++n) drawn.push_back(1 + random() % 20);
  }
  for (const std::vector<uint64_t>& sizes : models) {
    const uint64_t all = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
    const uint64_t largest = *std::max_element(sizes.begin(), sizes.end());
    double least = static_cast<double>(all);
    for (uint64_t window = 2 * largest; window <= all; window += 1 + all / 40) {
      const double bytes = BytesOfRound(sizes, {window});
      EXPECT_LE(bytes, least + 0.25 * static_cast<double>(all)) << all << ", window " << window;
      least = std::min(least, bytes);
      EXPECT_LE(bytes, static_cast<double>(all - window + 2 * largest) * 1.2 +
                           static_cast<double>(largest))
          << "all " << all << ", window " << window;
    }
  }
}

TEST(WeightPrefetcher, WhatStaysIsSpreadOverTheRound) {
  const std::vector<uint32_t> pass = Pass(24);
  Shelf shelf(Equal(24), 8);
  shelf.Late(pass, 4);
  // Six objects stay, with three streamed ones after each, so the fetches are spread as well.
  for (const uint32_t object : pass) EXPECT_LE(shelf.Use(object).fetches.size(), 2u) << object;
}

TEST(WeightPrefetcher, WhatStaysIsGivenUpForAnotherRowOfUses) {
  const std::vector<uint32_t> pass = Pass(12);
  const std::vector<uint32_t> step = ForwardAndBackward(12);
  Shelf shelf(Equal(12), 6);
  shelf.Late(pass, 4);
  shelf.Late(step, 3);
  EXPECT_EQ(shelf.FetchesOf(step), 12) << "both turns keep six of the twelve";
  // The passes before the steps do not count: another sequence followed the fourth of them.
  shelf.Late(pass, 10);
  EXPECT_EQ(shelf.FetchesOf(pass, 11), 11 * (12 - 4));
}

TEST(WeightPrefetcher, AnotherRowOfUsesIsTriedInTheSameWindow) {
  const std::vector<uint32_t> pass = Pass(12);
  Shelf shelf(Equal(12), 6);
  shelf.Late(ForwardAndBackward(12), 4);
  shelf.Late(pass, 4);
  EXPECT_EQ(shelf.FetchesOf(pass), 12 - 4) << "in a step nothing stays by name, but in a pass";
}

TEST(WeightPrefetcher, TheSameUseAgainAsksForNothing) {
  Shelf shelf({1, 1}, 2);
  shelf.Use(0);
  const PrefetchPlan again = shelf.Use(0);
  EXPECT_THAT(again.evictions, IsEmpty());
  EXPECT_THAT(again.fetches, IsEmpty());
}

TEST(WeightPrefetcher, BehindAnObjectsLastUseInARowItsRoomGoesToWhatComesNext) {
  Shelf shelf(Equal(6), 2);
  const auto use_twice = [&](uint32_t object) {
    shelf.Use(object);
    const PrefetchPlan between = shelf.Used(object);
    EXPECT_THAT(between.evictions, IsEmpty()) << object << " is used once more";
    shelf.Use(object);
    return shelf.Used(object);
  };
  for (int round = 0; round < 3; ++round) {
    for (uint32_t object = 0; object < 6; ++object) {
      const PrefetchPlan after = use_twice(object);
      if (round < 2) continue;
      EXPECT_THAT(after.evictions, ElementsAre(object));
      EXPECT_THAT(after.fetches, ElementsAre((object + 2) % 6));
    }
  }
}

TEST(WeightPrefetcher, BehindItsUseAnObjectGoesThatTheWindowHasNoRoomFor) {
  Shelf shelf({1, 2}, 3);
  shelf.Use(0);
  EXPECT_THAT(shelf.Used(0).evictions, IsEmpty());
  shelf.Use(1);
  EXPECT_THAT(shelf.Used(1).evictions, IsEmpty());
  shelf.SetWindow(2);
  shelf.Use(1);
  EXPECT_THAT(shelf.here(), ElementsAre(1));
  shelf.schedule().set_window_bytes(0);
  EXPECT_THAT(shelf.Used(1).evictions, ElementsAre(1));
}

TEST(WeightPrefetcher, AUseMoreThanExpectedBringsTheObjectBack) {
  Shelf shelf(Equal(6), 2);
  const auto use_all = [&](uint32_t thrice) {
    for (uint32_t object = 0; object < 6; ++object) {
      for (int use = 0; use < (object == thrice ? 3 : 2); ++use) {
        shelf.Use(object);
        shelf.Used(object);
      }
    }
  };
  for (int round = 0; round < 3; ++round) use_all(6);
  use_all(2);
  shelf.TakeFetches();
  use_all(2);
  EXPECT_EQ(shelf.TakeFetches(), 6) << "the next round expects three";
}

TEST(WeightPrefetcher, WhatIsInUseElsewhereIsNotDropped) {
  Shelf shelf({1, 1, 1}, 2);
  shelf.Use(0);
  shelf.Keep(0);
  shelf.Use(1);
  const PrefetchPlan plan = shelf.Use(2);
  EXPECT_THAT(plan.evictions, ElementsAre(1));
}

TEST(WeightPrefetcher, WhatCouldNotBeFetchedIsFetchedWhenItIsUsed) {
  Shelf shelf({1, 1, 1, 1}, 2);
  shelf.Late({0, 1, 2, 3}, 2);
  ASSERT_TRUE(shelf.here().contains(0)) << "it was asked for ahead";
  shelf.schedule().OnEvicted(0);
  const PrefetchPlan again = shelf.schedule().OnUse(0, [](uint32_t) { return true; });
  ASSERT_FALSE(again.fetches.empty());
  EXPECT_EQ(again.fetches.front(), 0u);
}

TEST(WeightPrefetcher, NothingIsFetchedAheadOfAChangeAndWhatComesNextIsRightBehindIt) {
  Shelf shelf(Equal(6), 2);
  const std::vector<uint32_t> step = ForwardAndBackward(6);
  for (int round = 0; round < 3; ++round) {
    shelf.Late(step);
    EXPECT_THAT(shelf.here(), ElementsAre(0, 1)) << "backward's last two, and no more";
    for (const uint32_t n : std::set<uint32_t>(shelf.here())) shelf.Drop(n);
    const PrefetchPlan plan = shelf.Change();
    if (round > 0) {
      EXPECT_THAT(plan.fetches, ElementsAre(0, 1)) << "round " << round;
    }
  }
  EXPECT_EQ(shelf.Late(step), 0);
}

TEST(WeightPrefetcher, AnotherKindOfStepInBetweenIsLearnedBesideTheFirst) {
  Shelf shelf(Equal(6), 2);
  const std::vector<uint32_t> train = ForwardAndBackward(6);
  const std::vector<uint32_t> evaluate = {0, 1, 2, 3, 4, 5};
  for (int round = 0; round < 2; ++round) {
    shelf.Late(train, 2);
    shelf.Late(evaluate);
  }
  // One access may be late where the two kinds of step diverge.
  EXPECT_LE(shelf.Late(train), 2);
  EXPECT_LE(shelf.Late(train), 2);
}

TEST(WeightPrefetcher, ALongHistoryIsForgottenWithoutLosingTheThread) {
  Shelf shelf(Equal(4), 2);
  const std::vector<uint32_t> step = ForwardAndBackward(4);
  shelf.Late(step, 2);
  EXPECT_LE(shelf.Late(step, 30'000), 2);
}

// Belady's minimum number of fetches for repeated accesses, independent of any prefetch.
int LeastFetches(const std::vector<uint32_t>& uses, size_t window, int rounds) {
  std::vector<uint32_t> all;
  for (int round = 0; round < rounds; ++round) all.insert(all.end(), uses.begin(), uses.end());
  std::set<uint32_t> here;
  int fetches = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (here.contains(all[i])) continue;
    ++fetches;
    if (here.size() == window) {
      const auto next_use = [&](uint32_t n) {
        return std::find(all.begin() + static_cast<std::ptrdiff_t>(i), all.end(), n) - all.begin();
      };
      here.erase(*std::max_element(here.begin(), here.end(), [&](uint32_t a, uint32_t b) {
        return next_use(a) < next_use(b);
      }));
    }
    here.insert(all[i]);
  }
  return fetches;
}

TEST(WeightPrefetcher, TrainingFetchesNoMoreThanTheBestOrderOfDrops) {
  for (const size_t window : {2, 3, 5, 7}) {
    const std::vector<uint32_t> step = ForwardAndBackward(8);
    Shelf shelf(Equal(8), window);
    shelf.Late(step, 3);
    shelf.TakeFetches();
    shelf.Late(step, 4);
    const int least = LeastFetches(step, window, 7) - LeastFetches(step, window, 3);
    EXPECT_EQ(shelf.TakeFetches(), least) << "window " << window;
  }
}

TEST(WeightPrefetcher, ASmallerWindowDropsWhatIsUsedLastEvenAtAnotherUseInARow) {
  Shelf shelf(Equal(4), 3);
  shelf.Late({0, 1, 2});
  shelf.SetWindow(2);
  EXPECT_THAT(shelf.Use(2).evictions, ElementsAre(0));
  shelf.SetWindow(1);
  EXPECT_THAT(shelf.Use(2).evictions, ElementsAre(1));
}

TEST(WeightPrefetcher, WithoutAWindowThereIsWhatIsUsedAndNothingElse) {
  Shelf shelf(Equal(4), 4);
  shelf.Late({0, 1, 2, 3}, 3);
  shelf.schedule().set_window_bytes(0);
  const PrefetchPlan plan = shelf.schedule().OnUse(0, [](uint32_t) { return true; });
  EXPECT_THAT(plan.evictions, UnorderedElementsAre(1, 2, 3));
  EXPECT_EQ(shelf.schedule().resident_bytes(), 1u);
}

TEST(WeightPrefetcher, NothingIsFetchedAheadThatASmallerWindowOnTheWayWouldDrop) {
  Shelf shelf(Equal(6), 4);
  for (int round = 0; round < 5; ++round) {
    if (round == 2) shelf.TakeFetches();
    for (uint32_t object = 0; object < 6; ++object) {
      shelf.SetWindow(object == 3 ? 1 : 4);
      shelf.Use(object);
    }
  }
  // At access 1 object 4 would fit, but the smaller window at access 3 would evict it again.
  EXPECT_EQ(shelf.TakeFetches(), 3 * 6) << "each comes once in a round";
}

TEST(WeightPrefetcher, WhatStaysInALoopFitsTheSmallestWindowAndFollowsIt) {
  const std::vector<uint32_t> pass = Pass(12);
  Shelf shelf(Equal(12), 8);
  const auto fetches = [&](uint64_t at_five) {
    for (int round = 0; round < 15; ++round) {
      if (round == 4) shelf.TakeFetches();
      for (const uint32_t object : pass) {
        shelf.SetWindow(object == 5 ? at_five : 8);
        shelf.Use(object);
      }
    }
    return shelf.TakeFetches();
  };
  const int with_eight = fetches(8);
  EXPECT_EQ(with_eight, 11 * 12 * (12 - 8) / (11 - 3)) << "three uses ahead";
  EXPECT_EQ(fetches(5), 11 * (12 - (5 - 2))) << "less than half";
  EXPECT_EQ(fetches(8), with_eight) << "there is room again";
}

TEST(WeightPrefetcher, RandomUsesOfRandomSizesNeverExceedTheWindow) {
  std::mt19937 random(7);
  for (int model = 0; model < 100; ++model) {
    const size_t count = 2 + random() % 10;
    std::vector<uint64_t> sizes_bytes;
    for (size_t n = 0; n < count; ++n) sizes_bytes.push_back(1 + random() % 100);
    const uint64_t largest = *std::max_element(sizes_bytes.begin(), sizes_bytes.end());
    Shelf shelf(sizes_bytes, largest + random() % 300);
    std::vector<uint32_t> step;
    for (int use = 0; use < 30; ++use) step.push_back(static_cast<uint32_t>(random() % count));
    for (int round = 0; round < 6; ++round) {
      shelf.SetWindow(largest + random() % 300);
      shelf.Late(step);  // Use checks the window
      if (random() % 4 == 0) shelf.Use(static_cast<uint32_t>(random() % count));
    }
  }
}

}  // namespace
}  // namespace pinion
