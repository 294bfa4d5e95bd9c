// Options that all users of the process's host tier must agree on.

#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/tests/engine/tier/host_tier_fixture.h"
#include "pinion/tests/support/recording_trace_sink.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

HostTierOptions WithRetries(int retries) {
  HostTierOptions options = SmallOptions();
  options.engine.transient_retries = retries;
  return options;
}

// Returns options for a pool that no other test has.
HostTierOptions WithOtherPool(HostTierOptions options = SmallOptions()) {
  options.allocator.low_percent = 80;
  return options;
}

struct Other {
  std::string field;
  std::function<void(HostTierOptions&)> change;
  std::string is_and_not;  // as in the message

  friend void PrintTo(const Other& other, std::ostream* out) { *out << other.field; }
};

using HostTierOptionsTest = HostTierTest;

auto IsRefused(const std::string& why) {
  return StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(why));
}

class HostTierOtherOptionsTest : public HostTierTest,
                                 public ::testing::WithParamInterface<Other> {};

INSTANTIATE_TEST_SUITE_P(
    Fields, HostTierOtherOptionsTest,
    ::testing::Values(
        Other{"allocator.warn_percent", [](auto& o) { o.allocator.warn_percent = 50.5; },
              "60 and not 50.5"},
        Other{"allocator.high_percent", [](auto& o) { o.allocator.high_percent = 95; },
              "90 and not 95"},
        Other{"allocator.low_percent", [](auto& o) { o.allocator.low_percent = 80; },
              "85 and not 80"},
        Other{"allocator.max_locked_bytes",
              [](auto& o) { o.allocator.max_locked_bytes = 8 * kMiB; },
              "18446744073709551615 and not 8388608"},
        Other{"allocator.ledger_directory",
              [](auto& o) { o.allocator.ledger_directory = ::testing::TempDir(); },
              "\"\" and not \"" + ::testing::TempDir()},
        Other{"allocator.segment_bytes", [](auto& o) { o.allocator.segment_bytes = 8 * kMiB; },
              "4194304 and not 8388608"},
        Other{"allocator.max_wait_for_deferred",
              [](auto& o) { o.allocator.max_wait_for_deferred = absl::Milliseconds(5); },
              "0 and not 5ms"},
        Other{"allocator.alignment_bytes", [](auto& o) { o.allocator.alignment_bytes = 8192; },
              "4096 and not 8192"},
        Other{"allocator.pageable_fallback", [](auto& o) { o.allocator.pageable_fallback = true; },
              "false and not true"},
        Other{"engine.max_chunk_bytes", [](auto& o) { o.engine.max_chunk_bytes = 5; },
              "134217728 and not 5"},
        Other{"engine.drain_timeout", [](auto& o) { o.engine.drain_timeout = absl::Seconds(1); },
              "1m and not 1s"},
        Other{"engine.transient_retries", [](auto& o) { o.engine.transient_retries = 0; },
              "2 and not 0"},
        Other{"engine.trace",
              [](auto& o) { o.engine.trace = std::make_shared<RecordingTraceSink>(); },
              "none and not the sink"},
        Other{"engine.time_transfers", [](auto& o) { o.engine.time_transfers = true; },
              "false and not true"}),
    [](const ::testing::TestParamInfo<Other>& info) {
      std::string name = info.param.field;
      for (char& c : name) c = c == '.' ? '_' : c;
      return name;
    });

TEST_P(HostTierOtherOptionsTest, OtherOptionsAreRefusedWithTheFieldAndBothValues) {
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> tier, OfProcess());
  HostTierOptions others = SmallOptions();
  GetParam().change(others);
  EXPECT_THAT(OfProcess(others),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("a host tier for emu already"),
                             HasSubstr(GetParam().field + " is " + GetParam().is_and_not))));
  EXPECT_THAT(OfProcess(), IsOk()) << "the one that lives is as it was";
}

TEST_P(HostTierOtherOptionsTest, TheSameOptionsAreShared) {
  HostTierOptions options = SmallOptions();
  GetParam().change(options);
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> first, OfProcess(options));
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> second, OfProcess(options));
  EXPECT_EQ(first, second);
}

// Fails to compile if an option is added: compare the new field, and add a row above.
TEST_F(HostTierOptionsTest, EveryFieldOfTheOptionsHasARow) {
  const HostTierOptions options;
  [[maybe_unused]] const auto& [allocator, engine, any_engine] = options;
  [[maybe_unused]] const auto& [warn, high, low, on_ram_level, max_locked, ledger, segment,
                                max_wait, alignment, pageable] = allocator;
  [[maybe_unused]] const auto& [max_chunk, drain_timeout, retries, trace, time_transfers] = engine;
  EXPECT_EQ(options.DifferenceTo(HostTierOptions()), "");
}

TEST_F(HostTierOptionsTest, OfSeveralDifferencesTheFirstIsNamed) {
  EXPECT_EQ(SmallOptions().DifferenceTo(WithOtherPool(WithRetries(0))),
            "allocator.low_percent is 85 and not 80");
}

TEST_F(HostTierOptionsTest, AFunctionForTheRamsLevelIsTheFirstUsersToGive) {
  HostTierOptions with = SmallOptions();
  with.allocator.on_ram_level = [](const RamLevelChange&) {};
  {
    PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> first, OfProcess(with));
    EXPECT_THAT(OfProcess(), IsOk()) << "who gives none has nothing against it";
    EXPECT_THAT(OfProcess(with), IsRefused("on_ram_level can be given by the first"));
  }
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> without, OfProcess());
  EXPECT_THAT(OfProcess(with), StatusIs(absl::StatusCode::kFailedPrecondition));
}

// ------------------------------------------------------------------------ users of the pool alone

HostTierOptions PoolAlone() {
  HostTierOptions options = SmallOptions();
  options.any_engine = true;
  return options;
}

TEST_F(HostTierOptionsTest, WhoWantsThePoolAloneTakesWhateverEngineThereIs) {
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> first, OfProcess(WithRetries(7)));
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> second, OfProcess(PoolAlone()));
  EXPECT_EQ(first, second);
  EXPECT_THAT(OfProcess(WithOtherPool(PoolAlone())), IsRefused("allocator.low_percent"));
  EXPECT_THAT(OfProcess(WithRetries(8)), IsRefused("transient_retries is 7 and not 8"));
}

TEST_F(HostTierOptionsTest, TheFirstWhoWantsAnEngineChoosesItForAllWhoTakeAny) {
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> pool, OfProcess(PoolAlone()));
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> second, OfProcess(PoolAlone()));
  EXPECT_THAT(OfProcess(WithOtherPool(WithRetries(6))),
              StatusIs(absl::StatusCode::kFailedPrecondition));
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> chosen, OfProcess(WithRetries(7)));
  EXPECT_EQ(pool, chosen);
  EXPECT_THAT(OfProcess(WithRetries(6)), IsRefused("transient_retries is 7 and not 6"));
}

TEST_F(HostTierOptionsTest, ADeviceThatCouldNotBeSetUpChoosesNothing) {
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> pool, OfProcess(PoolAlone()));
  EXPECT_THAT(pool->ForDevice(7), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(OfProcess(WithRetries(7)), IsOk());
}

TEST_F(HostTierOptionsTest, OnceADeviceIsSetUpItsEngineIsChosen) {
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> pool, OfProcess(PoolAlone()));
  ASSERT_THAT(pool->ForDevice(0), IsOk());
  EXPECT_THAT(OfProcess(WithRetries(7)), IsRefused("transient_retries is 2 and not 7"));
  EXPECT_THAT(OfProcess(), IsOk());
}

TEST_F(HostTierOptionsTest, OptionsThatCannotWorkAreRefusedWhetherOneLivesOrNot) {
  HostTierOptions no_chunk = SmallOptions();
  no_chunk.engine.max_chunk_bytes = 0;
  HostTierOptions no_segment = SmallOptions();
  no_segment.allocator.segment_bytes = 0;
  std::shared_ptr<HostTier> living;
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(OfProcess(no_chunk),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_chunk_bytes is 0")));
    EXPECT_THAT(OfProcess(no_segment),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("segment_bytes is 0")));
    PINION_ASSERT_OK_AND_ASSIGN(living, OfProcess());
  }
}

// -------------------------------------------------------------------------- a program's own pool

TEST_F(HostTierOptionsTest, AProgramsOwnPoolIsUsedAndSharedWithWhoeverBringsTheSame) {
  const std::shared_ptr<PinnedAllocator> pool = NewPool();
  HostTierOptions options = SmallOptions();
  options.allocator.on_ram_level = [](const RamLevelChange&) {};  // belongs to no pool
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> first, OfProcess(options, pool));
  EXPECT_EQ(&first->pool(), pool.get());
  EXPECT_EQ(first->source(), nullptr);
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> second,
                              OfProcess(WithOtherPool(), pool));  // the pool has its own options
  EXPECT_EQ(first, second);
}

TEST_F(HostTierOptionsTest, AnotherPoolIsRefused) {
  const auto refused = IsRefused("the pool of pinned memory is another one");
  {
    PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> tier, OfProcess());
    EXPECT_THAT(OfProcess(SmallOptions(), NewPool()), refused);
  }
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> tier,
                              OfProcess(SmallOptions(), NewPool()));
  EXPECT_THAT(OfProcess(SmallOptions(), NewPool()), refused);
}

TEST_F(HostTierOptionsTest, WhoBringsAPoolHasToAgreeOnTheEngine) {
  const std::shared_ptr<PinnedAllocator> pool = NewPool();
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> tier,
                              OfProcess(SmallOptions(), pool));
  EXPECT_THAT(OfProcess(WithRetries(0), pool), IsRefused("transient_retries"));
}

}  // namespace
}  // namespace pinion::testing
