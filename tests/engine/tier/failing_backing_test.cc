// Parcels whose backing fails: errors are passed on, and no bytes are lost.

#include "pinion/tests/engine/tier/failing_backing.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/tier/tier_world.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace failing_backing_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kLong = absl::Seconds(30);
constexpr uint64_t kBytes = 64 * kKiB;

class FailingBackingTest : public ::testing::Test {
 protected:
  ~FailingBackingTest() override {
    EXPECT_THAT(world_.machine().races(), IsEmpty());
    EXPECT_EQ(tiers_.live_blocks(), 0);
  }

  EngineWorld world_;
  const std::shared_ptr<FailingBacking> failing_ = std::make_shared<FailingBacking>();
  TierWorld tiers_{world_, failing_};
  Parcel::Reader reader_;
};

TEST_F(FailingBackingTest, WhereThereIsNoRoomThereIsNoParcel) {
  failing_->reserve = absl::ResourceExhaustedError("the disk is full");
  EXPECT_THAT(tiers_.NewParcel(kBytes),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("the disk is full")));
  failing_->reserve = absl::OkStatus();
  EXPECT_THAT(tiers_.NewParcel(kBytes), IsOk());
}

TEST_F(FailingBackingTest, AParcelThatCannotBeReadStaysAwayAndComesBackOnceItCan) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
  failing_->to_read = absl::DataLossError("the file is too short");
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_THAT(tiers_.TryRead(*parcel, reader_),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("the file is too short")));
    EXPECT_EQ(parcel->state(), Parcel::State::kAway);
    EXPECT_EQ(tiers_.live_blocks(), 0) << "the memory that was to be filled is free again";
  }
  EXPECT_EQ(world_.engine().GetStats().h2d.submitted_chunks, 0u);
  failing_->to_read = absl::OkStatus();
  EXPECT_EQ(tiers_.Read(*parcel, reader_), Pattern(1, kBytes));
  EXPECT_EQ(world_.engine().GetStats().h2d.submitted_bytes, kBytes);
}

TEST_F(FailingBackingTest, BytesThatDoNotArriveInPinnedMemoryAreAnErrorOfTheFetch) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
  failing_->reads = std::make_shared<BrokenTimeline>(absl::DataLossError("a bad sector"));
  EXPECT_THAT(tiers_.TryRead(*parcel, reader_),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("a bad sector")));
  EXPECT_EQ(parcel->state(), Parcel::State::kAway);
  EXPECT_EQ(tiers_.live_blocks(), 0);
  EXPECT_THAT(world_.engine().health(), IsOk());
  failing_->reads->Repair();
  EXPECT_EQ(tiers_.Read(*parcel, reader_), Pattern(1, kBytes));
}

TEST_F(FailingBackingTest, TheHostIsToldWhyItCannotSeeTheBytes) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes));
  failing_->to_read = absl::DataLossError("the file is too short");
  EXPECT_THAT(parcel->ViewOnHost(kLong),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("the file is too short")));
  failing_->to_read = absl::OkStatus();
  failing_->reads = std::make_shared<BrokenTimeline>(absl::DataLossError("a bad sector"));
  EXPECT_THAT(parcel->ViewOnHost(kLong),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("a bad sector")));
  failing_->reads->Repair();
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostBuffer> view, parcel->ViewOnHost(kLong));
  EXPECT_EQ(world_.ReadHost(*view), Pattern(1, kBytes));
}

// Releases all claims, including those of readable parcels.
TEST_F(FailingBackingTest, WhereOneOfABatchCannotBeReadNoneIsFetched) {
  const auto broken = std::make_shared<FailingBacking>();
  TierWorld others(world_, broken);
  const std::vector<std::shared_ptr<Parcel>> parcels = {tiers_.SendAway(Pattern(1, kBytes)),
                                                        others.SendAway(Pattern(2, kBytes)),
                                                        tiers_.SendAway(Pattern(3, kBytes))};
  broken->to_read = absl::DataLossError("the file is too short");
  std::vector<Arrival> arrivals;
  for (const std::shared_ptr<Parcel>& parcel : parcels) {
    parcel->AddReaders(1);
    arrivals.push_back({*parcel->ClaimIfAway(), tiers_.NewMemory(kBytes)});
  }
  GuardedMemories unneeded;
  EXPECT_THAT(tiers_.tier().Fetch(absl::MakeSpan(arrivals), tiers_.stream(), unneeded),
              StatusIs(absl::StatusCode::kDataLoss));
  arrivals.clear();
  EXPECT_EQ(tiers_.live_blocks(), 0);
  EXPECT_THAT(unneeded, IsEmpty());
  broken->to_read = absl::OkStatus();
  for (uint64_t i = 0; i < parcels.size(); ++i) {
    EXPECT_EQ(parcels[i]->state(), Parcel::State::kAway);
    Parcel::Reader reader;
    EXPECT_EQ(tiers_.Read(*parcels[i], reader), Pattern(i + 1, kBytes));
  }
}

}  // namespace failing_backing_test
}  // namespace pinion::testing
