#include "pinion/engine/tier/device_tier.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/faulty_world.h"
#include "pinion/tests/engine/tier/tier_world.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace device_tier_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using State = Parcel::State;

constexpr absl::Duration kLong = absl::Seconds(30);
constexpr uint64_t kBytes = 64 * kKiB;

// Returns parcels of Pattern(1), Pattern(2) and so on, ready to be copied out.
std::vector<Departure> NewDepartures(TierWorld& tiers, uint64_t count) {
  std::vector<Departure> departures;
  for (uint64_t i = 1; i <= count; ++i) {
    departures.push_back(tiers.NewDeparture(Pattern(i, kBytes)));
  }
  return departures;
}

class DeviceTierTest : public ::testing::Test {
 protected:
  ~DeviceTierTest() override { EXPECT_THAT(world_.machine().races(), IsEmpty()); }

  DirectionStats Out() { return world_.engine().GetStats().d2h; }
  DirectionStats In() { return world_.engine().GetStats().h2d; }

  EngineWorld world_;
  TierWorld tiers_{world_};
};

// -------------------------------------------------------------------------------------- offload

TEST_F(DeviceTierTest, ParcelsLeaveInOneBatchAndComeBackInOne) {
  std::vector<Departure> departures = NewDepartures(tiers_, 5);
  ASSERT_THAT(tiers_.tier().PutOut(absl::MakeSpan(departures)), IsOk());
  EXPECT_EQ(Out().submitted_transfers, 1u);
  EXPECT_EQ(Out().submitted_bytes, 5 * kBytes);
  std::vector<Arrival> arrivals;
  for (const Departure& departure : departures) {
    EXPECT_EQ(departure.parcel->state(), State::kHeld);
    EXPECT_THAT(departure.memory, ::testing::Each(::testing::IsFalse())) << "it is the parcel's";
    { const GuardedMemory evicted = departure.parcel->Evict(); }
    departure.parcel->AddReaders(1);
    arrivals.push_back({*departure.parcel->ClaimIfAway(), tiers_.NewMemory(kBytes)});
  }
  GuardedMemories unneeded;
  ASSERT_THAT(tiers_.tier().Fetch(absl::MakeSpan(arrivals), tiers_.stream(), unneeded), IsOk());
  EXPECT_THAT(unneeded, IsEmpty());
  for (uint64_t i = 0; i < departures.size(); ++i) {
    Parcel::Reader reader;
    EXPECT_EQ(tiers_.Read(*departures[i].parcel, reader), Pattern(i + 1, kBytes));
  }
  EXPECT_EQ(In().submitted_transfers, 1u);
  EXPECT_EQ(In().submitted_bytes, 5 * kBytes);
  EXPECT_EQ(tiers_.live_blocks(), 0);
}

// A view of memory with other users, and two pieces in swapped order.
TEST_F(DeviceTierTest, PiecesAreFoundWhereTheyWerePut) {
  const std::vector<uint8_t> bytes = Pattern(1, 1000);
  Departure departure;
  PINION_ASSERT_OK_AND_ASSIGN(departure.parcel, tiers_.tier().NewParcel(512, tiers_.stream()));
  departure.memory.push_back(tiers_.NewMemory(bytes));
  auto* const data = static_cast<uint8_t*>(departure.memory.front().data());
  departure.pieces = {{data + 700, 0, 100}, {data + 10, 256, 200}};
  const std::shared_ptr<Parcel> parcel = tiers_.PutOut(std::move(departure));
  { const GuardedMemory evicted = parcel->Evict(); }
  EXPECT_EQ(Out().submitted_bytes, 300u);
  Parcel::Reader reader;
  parcel->AddReaders(1);
  const std::vector<uint8_t> read = tiers_.Read(*parcel, reader);
  const auto range = [](const std::vector<uint8_t>& of, uint64_t begin, uint64_t size) {
    return std::vector<uint8_t>(of.begin() + begin, of.begin() + begin + size);
  };
  EXPECT_EQ(range(read, 0, 100), range(bytes, 700, 100));
  EXPECT_EQ(range(read, 256, 200), range(bytes, 10, 200));
}

// A kernel of one virtual second precedes the copy.
TEST_F(DeviceTierTest, TheStreamWaitsForTheCopyOutOfAnEvictionAndTheHostDoesNot) {
  Departure departure = tiers_.NewDeparture(Pattern(1, kBytes));
  Kernel kernel;
  kernel.name = "long";
  kernel.flops = 1e15;
  ASSERT_THAT(world_.machine().Launch(0, tiers_.stream(), kernel), IsOk());
  const double begin_ms = world_.machine().now_ms();
  const std::shared_ptr<Parcel> parcel = tiers_.PutOut(std::move(departure));
  const uint64_t waits = world_.engine().GetStats().event_waits;
  { const GuardedMemory evicted = parcel->Evict(); }
  EXPECT_EQ(world_.engine().GetStats().event_waits - waits, 1u);
  EXPECT_EQ(tiers_.live_blocks(), 0);
  EXPECT_LT(world_.machine().now_ms() - begin_ms, 1);
  world_.engine().Poll();
  EXPECT_FALSE(parcel->copy_out().IsDone());
  ASSERT_THAT(parcel->copy_out().Wait(kLong), IsOk());
  EXPECT_GT(world_.machine().now_ms() - begin_ms, 100) << "or the kernel was none to wait for";
}

// ---------------------------------------------------------------------------------------- fetch

TEST_F(DeviceTierTest, WhatNobodyIsLeftToReadIsHandedBackAndTheRestIsFetched) {
  std::vector<std::shared_ptr<Parcel>> parcels;
  std::vector<Arrival> arrivals;
  for (uint64_t i = 0; i < 3; ++i) {
    parcels.push_back(tiers_.SendAway(Pattern(i, kBytes), i == 1 ? 1 : 0));
    arrivals.push_back({*parcels.back()->ClaimIfAway(), tiers_.NewMemory(kBytes)});
  }
  GuardedMemories unneeded(1);
  ASSERT_THAT(tiers_.tier().Fetch(absl::MakeSpan(arrivals), tiers_.stream(), unneeded), IsOk());
  EXPECT_THAT(unneeded, SizeIs(3)) << "with what was there before";
  EXPECT_EQ(tiers_.live_blocks(), 3);
  unneeded.clear();
  EXPECT_EQ(tiers_.live_blocks(), 1);
  EXPECT_EQ(parcels[0]->state(), State::kAway);
  EXPECT_EQ(parcels[1]->state(), State::kFetched);
  EXPECT_EQ(parcels[2]->state(), State::kAway);
}

TEST_F(DeviceTierTest, WhatIsFetchedOnAnotherStreamBelongsToThatStream) {
  const std::shared_ptr<Parcel> parcel = tiers_.SendAway(Pattern(1, kBytes), 1);
  const StreamHandle other = world_.NewStream();
  DeviceMemory memory = tiers_.NewMemory(kBytes);
  ASSERT_THAT(world_.engine().OrderStreams(tiers_.stream(), other, kAfterOtherStream), IsOk());
  std::vector<Arrival> arrivals;
  arrivals.push_back({*parcel->ClaimIfAway(), std::move(memory)});
  GuardedMemories unneeded;
  ASSERT_THAT(tiers_.tier().Fetch(absl::MakeSpan(arrivals), other, unneeded), IsOk());
  GuardedMemory fetched = parcel->TakeFetched();
  EXPECT_EQ(fetched.stream(), other);
  ASSERT_THAT(fetched.copy().WaitOn(tiers_.stream(), kReadAfterCopyIn), IsOk());
  EXPECT_EQ(tiers_.BytesIn(fetched.memory()), Pattern(1, kBytes));
}

// --------------------------------------------------------------------------------------- faults

struct FaultyTierWorld : FaultyWorld {
  FaultyTierWorld() : FaultyWorld(WithoutRetries()), tiers(*this) {}
  TierWorld tiers;
};

TEST(DeviceTierFaultsTest, WhatCannotLeaveStaysWithTheCaller) {
  FaultyTierWorld world;
  std::vector<Departure> departures = NewDepartures(world.tiers, 2);
  world.FailNext("CopyAsync", Injected());
  EXPECT_THAT(world.tiers.tier().PutOut(absl::MakeSpan(departures)), IsInjected());
  for (uint64_t i = 0; i < 2; ++i) {
    EXPECT_EQ(departures[i].parcel->state(), State::kNew);
    EXPECT_EQ(world.tiers.BytesIn(departures[i].memory.front()), Pattern(i + 1, kBytes));
  }
  departures.clear();
  EXPECT_EQ(world.tiers.live_blocks(), 0);
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

// A poisoned device may still read the memory, whatever it reports.
TEST(DeviceTierFaultsTest, WhatAPoisonedDeviceMayStillCopyOutIsLeaked) {
  FaultyTierWorld world;
  std::vector<Departure> departures = NewDepartures(world.tiers, 2);
  world.FailNext("CopyAsync", DeviceLost());
  EXPECT_THAT(world.tiers.tier().PutOut(absl::MakeSpan(departures)), IsDeviceLost());
  for (const Departure& departure : departures) {
    EXPECT_EQ(departure.parcel->state(), State::kNew);
    EXPECT_FALSE(departure.memory.front());
  }
  departures.clear();
  EXPECT_EQ(world.tiers.live_blocks(), 2);
}

TEST(DeviceTierFaultsTest, WhatCannotBeFetchedIsAwayAndItsMemoryFree) {
  FaultyTierWorld world;
  const std::shared_ptr<Parcel> parcel = world.tiers.SendAway(Pattern(1, kBytes), 1);
  world.FailNext("CopyAsync", Injected());
  Parcel::Reader reader;
  EXPECT_THAT(world.tiers.TryRead(*parcel, reader), IsInjected());
  EXPECT_EQ(parcel->state(), State::kAway);
  EXPECT_EQ(world.tiers.live_blocks(), 0);
  EXPECT_EQ(world.tiers.Read(*parcel, reader), Pattern(1, kBytes));
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

TEST(DeviceTierFaultsTest, WhatAPoisonedDeviceMayStillCopyInIsLeaked) {
  FaultyTierWorld world;
  const std::shared_ptr<Parcel> parcel = world.tiers.SendAway(Pattern(1, kBytes), 1);
  ASSERT_THAT(parcel->copy_out().Wait(kLong), IsOk());
  world.FailNext("CopyAsync", DeviceLost());
  Parcel::Reader reader;
  EXPECT_THAT(world.tiers.TryRead(*parcel, reader), IsDeviceLost());
  EXPECT_EQ(parcel->state(), State::kAway);
  EXPECT_EQ(world.tiers.live_blocks(), 1);
}

// ----------------------------------------------------------------------------------------- link

uint64_t Copies(EngineWorld& world) { return world.machine().calls(DeviceCall::kCopy); }

TEST(DeviceTierDeathTest, AnEngineOrAPoolThatIsNullIsNamedWithTheRemedy) {
  EngineWorld world;
  const char* const refused = "a DeviceTier needs an engine and a pool: HostTier::ForDevice";
  const std::shared_ptr<PinnedAllocator> pool(&world.allocator(), [](PinnedAllocator*) {});
  EXPECT_DEATH(DeviceTier(nullptr, pool), refused);
  const std::shared_ptr<TransferEngine> engine(&world.engine(), [](TransferEngine*) {});
  EXPECT_DEATH(DeviceTier(engine, nullptr), refused);
}

TEST(DeviceTierLinkTest, ALinkIsMeasuredOnce) {
  EngineWorld world;
  TierWorld tiers(world);
  EXPECT_EQ(Copies(world), 0u) << "nobody has asked yet";
  const LinkCalibration link = tiers.tier().Link(tiers.stream());
  EXPECT_TRUE(link.modelled) << link.ToString();
  const uint64_t copies = Copies(world);
  EXPECT_GT(copies, 0u);
  EXPECT_EQ(tiers.tier().Link(world.NewStream()).ToString(), link.ToString());
  EXPECT_EQ(Copies(world), copies);
}

TEST(DeviceTierLinkTest, WhileAGraphIsCapturedALinkIsAssumedAndTheLogSaysSo) {
  const CapturedLog log;
  EngineWorld world;
  TierWorld tiers(world);
  ASSERT_THAT(world.machine().SetCapturing(tiers.stream(), true), IsOk());
  EXPECT_EQ(tiers.tier().Link(tiers.stream()).ToString(), AssumedLink().ToString());
  EXPECT_EQ(Copies(world), 0u) << "the graph would have them";
  EXPECT_THAT(log.text(), AllOf(HasSubstr("emu:0 is taken for a PCIe 4 device"),
                                HasSubstr("a graph is being captured"),
                                HasSubstr("OffloadSession::Reserve before the capture")));
  ASSERT_THAT(world.machine().SetCapturing(tiers.stream(), false), IsOk());
  EXPECT_TRUE(tiers.tier().Link(tiers.stream()).modelled) << "it is measured after all";
}

TEST(DeviceTierLinkTest, ALinkThatCannotBeMeasuredIsAssumed) {
  const CapturedLog log;
  EmulatedOptions options = TestMachineOptions();
  options.memory_bytes = 64 * kKiB;
  EngineWorld world(options);
  TierWorld tiers(world);
  EXPECT_EQ(tiers.tier().Link(tiers.stream()).ToString(), AssumedLink().ToString());
  EXPECT_THAT(log.text(), HasSubstr("out of memory"));
}

}  // namespace device_tier_test
}  // namespace pinion::testing
