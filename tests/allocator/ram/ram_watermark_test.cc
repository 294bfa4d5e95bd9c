#include "pinion/allocator/ram/ram_watermark.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/ram/host_ledger.h"
#include "pinion/allocator/ram/ram_probe.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

namespace pinion {
namespace {

using ::pinion::testing::CapturedLog;
using ::pinion::testing::FakeHost;
using ::pinion::testing::IsExhausted;
using ::pinion::testing::IsOk;
using ::pinion::testing::RunThreads;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// 100 GiB of RAM; a growth of n GiB is n percent.
class RamWatermarkTest : public ::testing::Test {
 protected:
  // One that soon has had enough of waiting.
  RamWatermark::MonotonicClock Impatient() {
    return [this] { return absl::Minutes(calls_of_clock_++); };
  }

  void SetUsedPercent(uint64_t percent) { host_.SetMeminfo(100 * kGiB, (100 - percent) * kGiB); }
  void EnterPodOfAGibibyte() {
    SetUsedPercent(10);
    host_.Write("proc/self/cgroup", "0::/pod\n");
    host_.Write("cgroup/pod/memory.max", "1073741824\n");
    host_.Write("cgroup/pod/memory.current", "0\n");
  }

  template <typename Refusal>
  void ExpectOneGrowthAtATime(uint64_t bytes, const Refusal& refusal) {
    RamWatermark watermark(options_, host_.Ram(), Impatient());
    std::optional<absl::StatusOr<RamWatermark::Growth>> first = watermark.AdmitGrowth(bytes);
    ASSERT_THAT(*first, IsOk());
    EXPECT_THAT(watermark.AdmitGrowth(bytes), refusal);
    first.reset();
    EXPECT_THAT(watermark.AdmitGrowth(bytes), IsOk());
    EXPECT_EQ(watermark.counts().waits, 1u);
  }

  auto LinesOfLog() const { return std::count(log_.text().begin(), log_.text().end(), '\n'); }

  FakeHost host_;
  AllocatorOptions options_;
  absl::Duration now_;
  std::atomic<int> calls_of_clock_{0};
  const CapturedLog log_;
};

TEST_F(RamWatermarkTest, AClockThatIsNullIsNamedWithTheRemedy) {
  EXPECT_DEATH(RamWatermark(options_, host_.Ram(), nullptr),
               "the clock is null; pass NewStopwatch");
}

TEST_F(RamWatermarkTest, AHostThatCannotBeReadHasNoMarks) {
  RamWatermark watermark(options_, host_.Ram());
  EXPECT_THAT(watermark.AdmitGrowth(1000 * kGiB), IsOk());
  EXPECT_EQ(watermark.BytesToGiveBack(1000 * kGiB), 0u);
}

TEST_F(RamWatermarkTest, TheHighMarkIsJudgedAfterTheGrowth) {
  SetUsedPercent(80);
  RamWatermark watermark(options_, host_.Ram());
  EXPECT_THAT(watermark.AdmitGrowth(10 * kGiB), IsOk());
  EXPECT_THAT(watermark.AdmitGrowth(11 * kGiB),
              IsExhausted("11 GiB", "80 GiB of 100 GiB", "91.0 %", "high_percent (90)",
                          "raise high_percent"));
}

// At the limit itself the kernel kills: what is left below it is the rest of the program's.
TEST_F(RamWatermarkTest, TheHighMarkHoldsForACgroupTooAndIsNamed) {
  EnterPodOfAGibibyte();
  RamWatermark watermark(options_, host_.Ram());
  EXPECT_THAT(watermark.AdmitGrowth(921 * kMiB), IsOk());
  EXPECT_THAT(watermark.AdmitGrowth(922 * kMiB),
              IsExhausted("that 90 % of cgroup /pod memory.max leaves: free some of it, or "
                          "raise that limit"));
}

// Ranks that each look first and then allocate pass the mark together.
TEST_F(RamWatermarkTest, GrowthsThatAreNotVisibleYetAreCountedIn) {
  SetUsedPercent(80);
  ExpectOneGrowthAtATime(6 * kGiB, IsExhausted("6 GiB about to be taken"));
}

TEST_F(RamWatermarkTest, GrowthsThatAreNotVisibleYetCountAgainstACgroupToo) {
  EnterPodOfAGibibyte();
  ExpectOneGrowthAtATime(600 * kMiB, IsExhausted("600 MiB about to be taken", "cgroup /pod"));
}

TEST_F(RamWatermarkTest, GrowthsOfOtherWatermarksWithTheSameLedgerAreCountedIn) {
  SetUsedPercent(80);
  RamWatermark watermark(options_, host_.Ram(), Impatient());
  RamWatermark other(options_, host_.Ram(), Impatient());
  RamWatermark stranger(options_, host_.Probe(), Impatient());
  const absl::StatusOr<RamWatermark::Growth> first = watermark.AdmitGrowth(6 * kGiB);
  ASSERT_THAT(first, IsOk());
  EXPECT_THAT(other.AdmitGrowth(6 * kGiB), Not(IsOk()));
  EXPECT_THAT(stranger.AdmitGrowth(6 * kGiB), IsOk());
}

// Containers on one host of 4 GiB, a quarter of which is used, with a ledger each: neither knows
// what the other one is about to pin.
class TwoContainersTest : public RamWatermarkTest {
 protected:
  struct Container {
    FakeHost host;
    std::string pod;
    std::unique_ptr<RamWatermark> watermark;
  };

  // Each grows before it sees anything of the other's growth.
  void StartAndGrowAtOnce(const std::string& limit_bytes, uint64_t growth_bytes) {
    for (int i : {0, 1}) {
      Container& container = containers_[i];
      container.pod = "cgroup/pod" + std::to_string(i);
      container.host.Write("proc/self/cgroup", "0::/pod" + std::to_string(i) + "\n");
      container.host.Write(container.pod + "/memory.max", limit_bytes + "\n");
      container.watermark =
          std::make_unique<RamWatermark>(options_, container.host.Ram(), Impatient());
      Use(i, 0);
    }
    const absl::StatusOr<RamWatermark::Growth> first = Grow(0, growth_bytes);
    EXPECT_THAT(first, IsOk());
    EXPECT_THAT(Grow(1, growth_bytes), IsOk());
  }
  // What a container uses, in all files that show it.
  void Use(int container, uint64_t bytes) {
    used_bytes_[container] = bytes;
    containers_[container].host.Write(containers_[container].pod + "/memory.current",
                                      std::to_string(bytes) + "\n");
    for (Container& each : containers_) {
      each.host.SetMeminfo(4 * kGiB, 3 * kGiB - used_bytes_[0] - used_bytes_[1]);
    }
  }
  absl::StatusOr<RamWatermark::Growth> Grow(int container, uint64_t bytes) {
    return containers_[container].watermark->AdmitGrowth(bytes);
  }

  std::array<Container, 2> containers_;
  std::array<uint64_t, 2> used_bytes_ = {};
};

TEST_F(TwoContainersTest, LimitsThatAddUpToWhatTheHostCanSpareKeepItForBoth) {
  StartAndGrowAtOnce("1073741824", 921 * kMiB);
  Use(0, 921 * kMiB);
  Use(1, 921 * kMiB);
  EXPECT_THAT(Grow(0, kMiB), IsExhausted("cgroup /pod0"));
  EXPECT_THAT(Grow(1, kMiB), IsExhausted("cgroup /pod1"));
}

TEST_F(TwoContainersTest,
       LimitsThatAddUpToMoreAreKeptByTheHostsMarkOnceTheKernelShowsWhatIsPinned) {
  StartAndGrowAtOnce("2147483648", 1800 * kMiB);
  Use(0, 1800 * kMiB);
  EXPECT_THAT(Grow(1, 1800 * kMiB), IsExhausted("high_percent"));
}

// While a growth is being pinned it is in the kernel's numbers and in the ledger. Whoever comes
// then does not fit by that sum, and does fit once the pin is done.
TEST_F(RamWatermarkTest, AGrowthThatIsBecomingVisibleIsNotChargedTwice) {
  SetUsedPercent(80);
  RamWatermark watermark(options_, host_.Ram(), [] { return absl::ZeroDuration(); });
  std::optional<RamWatermark::Growth> first = watermark.AdmitGrowth(6 * kGiB).value();
  SetUsedPercent(86);
  RunThreads(2, [&](int thread) {
    if (thread == 0) {
      EXPECT_THAT(watermark.AdmitGrowth(3 * kGiB), IsOk());
    } else {
      while (watermark.counts().waits == 0) absl::SleepFor(absl::Microseconds(100));
      first.reset();
    }
  });
}

TEST_F(RamWatermarkTest, WhoDoesNotWantToWaitIsRefusedAtOnce) {
  SetUsedPercent(80);
  RamWatermark watermark(options_, host_.Ram(), [] { return absl::ZeroDuration(); });
  const absl::StatusOr<RamWatermark::Growth> first = watermark.AdmitGrowth(6 * kGiB);
  absl::Duration no_wait;
  EXPECT_THAT(watermark.AdmitGrowth(6 * kGiB, no_wait), Not(IsOk()));
  EXPECT_EQ(watermark.counts().waits, 0u);
}

TEST_F(RamWatermarkTest, WhatDoesNotFitAnywayDoesNotWait) {
  SetUsedPercent(86);
  RamWatermark watermark(options_, host_.Ram(), [] { return absl::ZeroDuration(); });
  const absl::StatusOr<RamWatermark::Growth> first = watermark.AdmitGrowth(kGiB);
  EXPECT_THAT(watermark.AdmitGrowth(5 * kGiB), Not(IsOk()));
  EXPECT_EQ(watermark.counts().waits, 0u);
}

TEST_F(RamWatermarkTest, OfThreadsThatGrowAtOnceThoseThatFitAreAdmittedAndNoMore) {
  SetUsedPercent(80);
  for (int round = 0; round < 20; ++round) {
    RamWatermark watermark(options_, host_.Ram(), Impatient());
    Mutex mu;
    std::vector<RamWatermark::Growth> admitted;
    RunThreads(8, [&](int) {
      absl::StatusOr<RamWatermark::Growth> growth = watermark.AdmitGrowth(3 * kGiB);
      if (!growth.ok()) return;
      MutexLock lock(mu);
      admitted.push_back(*std::move(growth));
    });
    ASSERT_EQ(admitted.size(), 3u);
  }
}

TEST_F(RamWatermarkTest, EachGrowthAboveTheWarnMarkIsCountedButOneAMinuteIsLogged) {
  SetUsedPercent(65);
  RamWatermark watermark(options_, host_.Ram(), [this] { return now_; });
  for (int i = 0; i < 3; ++i) EXPECT_THAT(watermark.AdmitGrowth(kGiB), IsOk());
  EXPECT_EQ(watermark.counts().warnings, 3u);
  EXPECT_THAT(log_.text(), AllOf(HasSubstr("65.0 %"), HasSubstr("warn_percent is 60")));
  EXPECT_EQ(LinesOfLog(), 1);
  for (const int lines : {1, 2}) {
    now_ += lines == 1 ? absl::Minutes(1) - absl::Nanoseconds(1) : absl::Nanoseconds(1);
    EXPECT_THAT(watermark.AdmitGrowth(kGiB), IsOk());
    EXPECT_EQ(LinesOfLog(), lines);
  }
}

TEST_F(RamWatermarkTest, UpToTheWarnMarkNothingIsSaid) {
  SetUsedPercent(50);
  RamWatermark watermark(options_, host_.Ram());
  EXPECT_THAT(watermark.AdmitGrowth(10 * kGiB), IsOk());
  EXPECT_EQ(watermark.counts().warnings, 0u);
  EXPECT_EQ(log_.text(), "");
}

TEST_F(RamWatermarkTest, WhatOthersAreAboutToPinCountsTowardsTheWarnMark) {
  SetUsedPercent(50);
  RamWatermark watermark(options_, host_.Ram());
  const absl::StatusOr<RamWatermark::Growth> others = watermark.AdmitGrowth(6 * kGiB);
  EXPECT_THAT(watermark.AdmitGrowth(6 * kGiB), IsOk());
  EXPECT_EQ(watermark.counts().warnings, 1u);
}

// The clock stands still but for the steps that the test makes.
TEST_F(RamWatermarkTest, TheWaitEndsAtItsLongest) {
  SetUsedPercent(80);
  int calls = 0;
  RamWatermark watermark(options_, host_.Ram(), [&] {
    return calls++ == 0 ? absl::ZeroDuration() : RamWatermark::kLongestWait;
  });
  const absl::StatusOr<RamWatermark::Growth> others = watermark.AdmitGrowth(6 * kGiB);
  calls = 0;
  EXPECT_THAT(watermark.AdmitGrowth(6 * kGiB), Not(IsOk()));
  EXPECT_EQ(calls, 2);
}

// A processor is what those who pin need.
TEST_F(RamWatermarkTest, WhoWaitsSleeps) {
  SetUsedPercent(80);
  const internal::Stopwatch stopwatch;
  int calls = 0;
  RamWatermark watermark(options_, host_.Ram(), [&] {
    ++calls;
    return stopwatch.Elapsed();
  });
  const absl::StatusOr<RamWatermark::Growth> others = watermark.AdmitGrowth(6 * kGiB);
  calls = 0;
  EXPECT_THAT(watermark.AdmitGrowth(6 * kGiB), Not(IsOk()));
  EXPECT_LE(calls, 2 + RamWatermark::kLongestWait / absl::Milliseconds(1));
}

TEST_F(RamWatermarkTest, GrowthsOfOneRequestShareAWait) {
  SetUsedPercent(80);
  RamWatermark watermark(options_, host_.Ram(), [this] { return now_ += absl::Milliseconds(60); });
  const absl::StatusOr<RamWatermark::Growth> others = watermark.AdmitGrowth(6 * kGiB);
  absl::Duration wait_left = absl::Milliseconds(100);
  EXPECT_THAT(watermark.AdmitGrowth(kGiB, wait_left), IsOk());
  EXPECT_EQ(wait_left, absl::Milliseconds(100)) << "nothing was in the way";
  EXPECT_THAT(watermark.AdmitGrowth(6 * kGiB, wait_left), Not(IsOk()));
  EXPECT_EQ(wait_left, -absl::Milliseconds(20));
  EXPECT_THAT(watermark.AdmitGrowth(5 * kGiB, wait_left), Not(IsOk()));
  EXPECT_EQ(wait_left, -absl::Milliseconds(20));
  EXPECT_EQ(watermark.counts().waits, 1u);
}

TEST_F(RamWatermarkTest, BytesToGiveBackGoDownToTheLowMarkOrMakeRoomForTheGrowthAndNoMore) {
  const struct {
    const char* name;
    uint64_t used_percent;
    uint64_t growth_bytes;
    uint64_t bytes_to_give_back;
  } rows[] = {
      {"above the high mark", 92, kMiB, 7 * kGiB},
      {"below the high mark", 87, kMiB, 0},
      {"a growth that would pass the high mark", 86, 6 * kGiB, 2 * kGiB},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.name);
    SetUsedPercent(row.used_percent);
    const uint64_t bytes = RamWatermark(options_, host_.Ram()).BytesToGiveBack(row.growth_bytes);
    EXPECT_GE(bytes, row.bytes_to_give_back);
    EXPECT_LE(bytes, row.bytes_to_give_back + (row.bytes_to_give_back == 0 ? 0 : kMiB));
  }
}

TEST_F(RamWatermarkTest, APartOfAByteAboveTheMarkIsAByteToGiveBack) {
  host_.SetMeminfo(31 * kKiB, kKiB);
  EXPECT_EQ(RamWatermark(options_, host_.Ram()).BytesToGiveBack(0), 3738u)
      << "85 % are 26982.4 bytes";
}

// Whatever the marks and the host are: what BytesToGiveBack says lets the refused growth pass.
TEST_F(RamWatermarkTest, AfterTheBytesWereGivenBackTheGrowthPasses) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  int refused = 0;
  while (refused < 100) {
    options_.high_percent = static_cast<double>(10 + random() % 90);
    options_.low_percent = options_.high_percent / static_cast<double>(1 + random() % 3);
    options_.warn_percent = options_.high_percent;
    const uint64_t total = kGiB + random() % (100 * kGiB);
    const uint64_t used = random() % total;
    host_.SetMeminfo(total, total - used);
    RamWatermark watermark(options_, host_.Ram());
    const uint64_t growth = 1 + random() % (total / 4);
    if (watermark.AdmitGrowth(growth).ok()) continue;
    ++refused;
    const uint64_t bytes = watermark.BytesToGiveBack(growth);
    if (bytes > used) continue;  // it does not fit the empty host
    // The file is in units of 1 KiB.
    host_.SetMeminfo(total, total - used + bytes + 2 * kKiB);
    EXPECT_THAT(watermark.AdmitGrowth(growth), IsOk())
        << growth << " with " << used << " of " << total << " in use, marks at "
        << options_.low_percent << " and " << options_.high_percent;
  }
}

// Tests must not depend on other processes of this machine.
TEST(RoomyHostTest, TheLedgerOfThisUserIsTheTestsOwn) {
  const HostLedger ledger = HostLedger::OfThisUser();
  const HostLedger::Reservation reservation = ledger.Reserve(5);
  EXPECT_EQ(ledger.reserved_bytes(), 5u);
  std::vector<std::string> ledgers;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed_meanwhile;
    const std::string path = std::filesystem::read_symlink(file, closed_meanwhile).string();
    if (path.find("pinion_ledger_") != std::string::npos) ledgers.push_back(path);
  }
  EXPECT_THAT(ledgers, ElementsAre(Not(StartsWith("/dev/shm/pinion_ledger_"))));
}

// --- Levels ---

class RamLevelTest : public RamWatermarkTest {
 protected:
  RamLevelTest() {
    options_.on_ram_level = [this](const RamLevelChange& change) { changes_.push_back(change); };
  }

  void ObserveAt(RamWatermark& watermark, std::initializer_list<uint64_t> used_percents) {
    for (const uint64_t percent : used_percents) {
      SetUsedPercent(percent);
      watermark.Observe();
    }
  }

  std::vector<RamLevel> Levels() const {
    std::vector<RamLevel> levels;
    for (const RamLevelChange& change : changes_) levels.push_back(change.to);
    return levels;
  }

  std::vector<RamLevelChange> changes_;
};

TEST_F(RamLevelTest, AChangeIsToldOnceWithItsNumbers) {
  RamWatermark watermark(options_, host_.Ram());
  ObserveAt(watermark, {65, 65});
  ASSERT_EQ(changes_.size(), 1u);
  EXPECT_EQ(changes_[0].from, RamLevel::kNormal);
  EXPECT_EQ(changes_[0].to, RamLevel::kWarn);
  EXPECT_EQ(changes_[0].percent, 65.0);
  EXPECT_EQ(changes_[0].headroom_bytes, 35 * kGiB);
}

TEST_F(RamLevelTest, ALevelIsEnteredAboveItsMarkAndLeftWellBelow) {
  RamWatermark watermark(options_, host_.Ram());  // 60, 90, and 85 to leave the high one
  ObserveAt(watermark, {60, 61, 59, 56, 90, 91, 89, 86, 85, 56, 55});
  EXPECT_THAT(Levels(),
              ElementsAre(RamLevel::kWarn, RamLevel::kHigh, RamLevel::kWarn, RamLevel::kNormal));
}

TEST_F(RamLevelTest, GrowthSamplesTheLevelAndAReservationIsNoLevel) {
  SetUsedPercent(50);
  RamWatermark watermark(options_, host_.Ram());
  const absl::StatusOr<RamWatermark::Growth> growth = watermark.AdmitGrowth(15 * kGiB);
  watermark.Observe();
  EXPECT_TRUE(changes_.empty());
  SetUsedPercent(70);
  EXPECT_THAT(watermark.AdmitGrowth(kMiB), IsOk());
  EXPECT_THAT(Levels(), ElementsAre(RamLevel::kWarn));
}

TEST_F(RamLevelTest, AboveTheHighMarkNothingGrowsUntilTheHostIsDownToTheLowMark) {
  RamWatermark watermark(options_, host_.Ram());
  ObserveAt(watermark, {91});
  SetUsedPercent(87);
  EXPECT_THAT(watermark.AdmitGrowth(kMiB),
              IsExhausted("low_percent (85): free some of its RAM, or raise both"));
  EXPECT_GE(watermark.BytesToGiveBack(kMiB), 2 * kGiB);
  SetUsedPercent(85);
  EXPECT_THAT(watermark.AdmitGrowth(kMiB), IsOk());
}

// high - low may be more than the warn mark is.
TEST_F(RamLevelTest, ALowWarnMarkIsLeftToo) {
  options_.warn_percent = 20;
  options_.low_percent = 60;
  RamWatermark watermark(options_, host_.Ram());
  ObserveAt(watermark, {21, 11, 10});
  EXPECT_THAT(Levels(), ElementsAre(RamLevel::kWarn, RamLevel::kNormal));
  EXPECT_EQ(changes_[1].percent, 10.0);
}

TEST_F(RamLevelTest, ACallbackThatThrowsLeavesNoReservation) {
  options_.on_ram_level = [](const RamLevelChange&) { throw std::runtime_error("the user's"); };
  RamWatermark watermark(options_, host_.Ram());
  SetUsedPercent(65);
  EXPECT_THROW((void)watermark.AdmitGrowth(kMiB), std::runtime_error);
  EXPECT_EQ(host_.Ram().ledger.reserved_bytes(), 0u);
  EXPECT_THAT(watermark.AdmitGrowth(kMiB), IsOk());
}

// Files are read, and the callback runs, while a reservation would hold up other processes.
TEST_F(RamLevelTest, AGrowthThatDoesNotFitAnywayReservesNothing) {
  uint64_t reserved_bytes = UINT64_MAX;
  options_.on_ram_level = [&](const RamLevelChange&) {
    reserved_bytes = host_.Ram().ledger.reserved_bytes();
  };
  RamWatermark watermark(options_, host_.Ram());
  SetUsedPercent(65);
  EXPECT_THAT(watermark.AdmitGrowth(uint64_t{1} << 47), Not(IsOk()));
  EXPECT_EQ(reserved_bytes, 0u);
}

TEST_F(RamLevelTest, TheCallbackMayUseTheWatermarkThatCallsIt) {
  RamWatermark* self = nullptr;
  int calls = 0;
  options_.on_ram_level = [&](const RamLevelChange&) {
    ++calls;
    self->Observe();
    EXPECT_THAT(self->AdmitGrowth(kMiB), IsOk());
  };
  RamWatermark watermark(options_, host_.Ram());
  self = &watermark;
  SetUsedPercent(65);
  EXPECT_THAT(watermark.AdmitGrowth(kMiB), IsOk());
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace pinion
