// The contract of Backing, and parcels whose backing fails.

#include "pinion/engine/tier/backing.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/tier/slow_backing.h"
#include "pinion/tests/engine/tier/tier_world.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace backing_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kLong = absl::Seconds(30);
constexpr uint64_t kBytes = 64 * kKiB;

uint64_t UsedBytes(EngineWorld& world) { return world.allocator().GetStats().used_bytes.current; }

// ------------------------------------------------------------------------------ every backing

struct Kind {
  std::string name;
  std::function<std::shared_ptr<Backing>(EngineWorld&)> make;

  friend void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }
};

class BackingTest : public ::testing::TestWithParam<Kind> {
 protected:
  ~BackingTest() override {
    EXPECT_THAT(world_.machine().races(), IsEmpty());
    EXPECT_EQ(tiers_.live_blocks(), 0);
  }
  uint64_t MovedIn() { return world_.engine().GetStats().h2d.submitted_bytes; }
  uint64_t MovedOut() { return world_.engine().GetStats().d2h.submitted_bytes; }

  EngineWorld world_;
  Parcel::Reader reader_;
  TierWorld tiers_{world_, GetParam().make(world_)};
};

INSTANTIATE_TEST_SUITE_P(
    Backings, BackingTest,
    ::testing::Values(
        Kind{"Pinned", [](EngineWorld&) { return std::make_shared<PinnedBacking>(); }},
        Kind{"Slow",
             [](EngineWorld& world) { return std::make_shared<SlowBacking>(world.machine()); }}),
    [](const ::testing::TestParamInfo<Kind>& info) { return info.param.name; });

TEST_P(BackingTest, BytesComeBackBitByBit) {
  for (const uint64_t size_bytes : {uint64_t{1}, uint64_t{255}, 4 * kKiB, 300 * kKiB + 7}) {
    const std::vector<uint8_t> bytes = Pattern(size_bytes, size_bytes);
    const uint64_t moved_out = MovedOut();
    const uint64_t moved_in = MovedIn();
    const std::shared_ptr<Parcel> parcel = tiers_.SendAway(bytes, 1);
    EXPECT_EQ(tiers_.live_blocks(), 0) << "nothing of it is on the device";
    Parcel::Reader reader;
    EXPECT_EQ(tiers_.Read(*parcel, reader), bytes);
    EXPECT_EQ(MovedOut() - moved_out, size_bytes);
    EXPECT_EQ(MovedIn() - moved_in, size_bytes);
  }
}

TEST_P(BackingTest, ParcelsDoNotGetMixedUp) {
  std::vector<std::shared_ptr<Parcel>> parcels;
  for (uint64_t i = 0; i < 20; ++i) parcels.push_back(tiers_.SendAway(Pattern(i, kBytes + i)));
  for (uint64_t i = 20; i-- > 0;) {
    Parcel::Reader reader;
    parcels[i]->AddReaders(1);
    EXPECT_EQ(tiers_.Read(*parcels[i], reader), Pattern(i, kBytes + i)) << i;
  }
}

TEST_P(BackingTest, AParcelCanBeReadAgainAndAgain) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
  for (uint64_t i = 1; i <= 3; ++i) {
    EXPECT_EQ(tiers_.Read(*parcel, reader_), Pattern(1, kBytes));
    EXPECT_EQ(MovedIn(), i * kBytes) << "what was read has left the device";
  }
}

TEST_P(BackingTest, TheHostSeesTheBytesOfAParcelThatHasJustLeft) {
  const std::shared_ptr<Parcel> parcel = tiers_.PutOut(Pattern(1, kBytes));
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostBuffer> view, parcel->ViewOnHost(kLong));
  EXPECT_EQ(world_.ReadHost(*view), Pattern(1, kBytes));
  EXPECT_EQ(MovedIn(), 0u);
}

TEST_P(BackingTest, TheHostAndTheDeviceSeeTheSameBytes) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostBuffer> before, parcel->ViewOnHost(kLong));
  EXPECT_EQ(tiers_.Read(*parcel, reader_), Pattern(1, kBytes));
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostBuffer> after, parcel->ViewOnHost(kLong));
  EXPECT_EQ(world_.ReadHost(*before), Pattern(1, kBytes));
  EXPECT_EQ(world_.ReadHost(*after), Pattern(1, kBytes));
}

// Copies take effect as late as possible, so each parcel is destroyed during its copies. The next
// parcel gets the memory that became free.
TEST_P(BackingTest, AParcelThatIsDroppedWhileCopiesAreUnderWayHurtsNobodyElse) {
  const std::vector<std::function<void()>> lives = {
      [&] { EXPECT_THAT(tiers_.NewParcel(kBytes), IsOk()); },
      [&] { tiers_.PutOut(Pattern(1, kBytes)); },
      [&] { tiers_.SendAway(Pattern(2, kBytes)); },
      [&] { EXPECT_THAT(tiers_.SendAway(Pattern(3, kBytes))->ToRead(), IsOk()); },
      [&] {
        const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(4, kBytes), 1);
        tiers_.Fetch(*parcel->ClaimIfAway());
      },
      [&] {
        const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(5, kBytes), 2);
        EXPECT_EQ(tiers_.Read(*parcel, reader_), Pattern(5, kBytes));
      },
  };
  uint64_t next = 100;
  for (const std::function<void()>& live : lives) {
    live();
    EXPECT_EQ(tiers_.live_blocks(), 0);
    const std::shared_ptr<Parcel> other = tiers_.SendAway(Pattern(++next, kBytes));
    PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostBuffer> view, other->ViewOnHost(kLong));
    EXPECT_EQ(world_.ReadHost(*view), Pattern(next, kBytes));
  }
}

TEST_P(BackingTest, ItGivesAllPinnedMemoryBack) {
  {
    const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
    EXPECT_EQ(tiers_.Read(*parcel, reader_), Pattern(1, kBytes));
    EXPECT_GT(UsedBytes(world_), 0u);
  }
  while (UsedBytes(world_) > 0) {
    // The next allocation polls the tickets of deferred blocks.
    ASSERT_THAT(world_.engine().Drain(kLong), IsOk());
    ASSERT_THAT(world_.allocator().Allocate(kMiB), IsOk());
    absl::SleepFor(absl::Microseconds(20));
  }
}

TEST_P(BackingTest, WhatThePoolRefusesIsWhatReserveReturns) {
  const auto source = std::make_shared<FakeSource>();
  source->LimitBytes(kMiB);
  AllocatorOptions options;
  options.segment_bytes = kMiB;
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<PinnedAllocator> pool,
                              PinnedAllocator::Create(options, source, FakeHost().Probe()));
  const std::shared_ptr<Backing> backing = GetParam().make(world_);
  EXPECT_THAT(backing->Reserve(pool, 0), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(backing->Reserve(pool, 2 * kMiB),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("2 MiB")));
  EXPECT_THAT(backing->Reserve(pool, kKiB), IsOk());
}

// ---------------------------------------------------------------------------------- a slow backing

class SlowBackingTest : public ::testing::Test {
 protected:
  EngineWorld world_;
  Parcel::Reader reader_;
  const std::shared_ptr<SlowBacking> slow_ = std::make_shared<SlowBacking>(world_.machine());
  TierWorld tiers_{world_, slow_};
};

TEST_F(SlowBackingTest, PinnedMemoryIsGivenBackOnceTheBytesHaveGoneFurther) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
  slow_->Drain();
  EXPECT_EQ(UsedBytes(world_), 0u) << "the parcel lives, its bytes are elsewhere";
  EXPECT_EQ(tiers_.Read(*parcel, reader_), Pattern(1, kBytes));
}

TEST_F(SlowBackingTest, AFetchWaitsForTheThreadThatFillsItsPinnedMemory) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
  slow_->Drain();
  slow_->Pause();
  const uint64_t waits = slow_->waits();
  std::vector<uint8_t> read;
  std::thread fetcher([&] { read = tiers_.Read(*parcel, reader_); });
  while (slow_->waits() == waits) absl::SleepFor(absl::Microseconds(20));
  EXPECT_EQ(parcel->state(), Parcel::State::kFetching);
  EXPECT_EQ(world_.engine().GetStats().h2d.submitted_chunks, 0u);
  slow_->Resume();
  fetcher.join();
  EXPECT_EQ(read, Pattern(1, kBytes));
  EXPECT_THAT(world_.machine().races(), IsEmpty());
}

TEST_F(SlowBackingTest, TheHostWaitsNoLongerThanItWantsTo) {
  slow_->Pause();
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes));
  EXPECT_THAT(parcel->ViewOnHost(absl::Milliseconds(1)),
              StatusIs(absl::StatusCode::kDeadlineExceeded));
  EXPECT_THAT(parcel->ViewOnHost(absl::ZeroDuration()),
              StatusIs(absl::StatusCode::kDeadlineExceeded));
  slow_->Resume();
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostBuffer> view, parcel->ViewOnHost(kLong));
  EXPECT_EQ(world_.ReadHost(*view), Pattern(1, kBytes));
}

// ------------------------------------------------------------------------------- a faulty backing

class NullBacking final : public Backing {
 public:
  absl::StatusOr<std::shared_ptr<ParcelPlace>> Reserve(const std::shared_ptr<PinnedAllocator>&,
                                                       uint64_t) override {
    return nullptr;
  }
};

// A place without buffers, or one that has lost its bytes.
class NullPlace final : public ParcelPlace {
 public:
  explicit NullPlace(std::shared_ptr<HostBuffer> buffer) : buffer_(std::move(buffer)) {}

  std::shared_ptr<HostBuffer> ToWrite() override { return buffer_; }
  void Written(const Transfer&) override {}
  absl::StatusOr<std::shared_ptr<HostBuffer>> ToRead() override { return nullptr; }

 private:
  const std::shared_ptr<HostBuffer> buffer_;
};

class NullPlaceBacking final : public Backing {
 public:
  explicit NullPlaceBacking(std::shared_ptr<HostBuffer> buffer) : buffer_(std::move(buffer)) {}

  absl::StatusOr<std::shared_ptr<ParcelPlace>> Reserve(const std::shared_ptr<PinnedAllocator>&,
                                                       uint64_t) override {
    return std::make_shared<NullPlace>(buffer_);
  }

 private:
  const std::shared_ptr<HostBuffer> buffer_;
};

TEST(BackingDeathTest, ABufferThatIsNullIsNamedWithTheRemedy) {
  EngineWorld world;
  TierWorld unwritable(world, std::make_shared<NullPlaceBacking>(nullptr));
  EXPECT_DEATH(unwritable.SendAway(Pattern(1, kBytes)),
               "ParcelPlace::ToWrite returned null for 65536 bytes: return pinned memory");
  TierWorld unreadable(world, std::make_shared<NullPlaceBacking>(world.NewHostBuffer(kBytes)));
  const std::shared_ptr<Parcel> parcel = unreadable.SendAway(Pattern(1, kBytes));
  const auto refused = StatusIs(absl::StatusCode::kInvalidArgument,
                                HasSubstr("ParcelPlace::ToRead returned null for 65536 bytes"));
  EXPECT_THAT(parcel->ToRead(), refused);
  EXPECT_THAT(parcel->ViewOnHost(kLong), refused);
}

TEST(PinnedBackingTest, APoolThatIsNullIsRefusedWithTheRemedy) {
  EXPECT_THAT(PinnedBacking().Reserve(nullptr, kBytes),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("of 65536 bytes: the pool is null; pass HostTier::pool()")));
}

TEST(BackingDeathTest, APlaceThatIsNullIsNamedWithTheRemedy) {
  EngineWorld world;
  TierWorld tiers(world, std::make_shared<NullBacking>());
  EXPECT_DEATH((void)tiers.NewParcel(kBytes),
               "Backing::Reserve returned null for 65536 bytes: return ResourceExhausted");
}

}  // namespace backing_test
}  // namespace pinion::testing
