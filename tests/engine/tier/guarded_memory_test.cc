#include "pinion/engine/tier/guarded_memory.h"

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/process_exit.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/faulty_world.h"
#include "pinion/tests/engine/tier/tier_world.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace guarded_memory_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr absl::Duration kLong = absl::Seconds(30);
constexpr uint64_t kBytes = 64 * kKiB;

// Device memory with Pattern(seed), a copy out of it in flight, and the copy's host buffer.
struct CopyOut {
  CopyOut(EngineWorld& world, TierWorld& tiers, uint64_t seed)
      : host(world.NewHostBuffer(kBytes)),
        memory(tiers.NewMemory(Pattern(seed, kBytes))),
        copy(world.CopyOut(host, memory.data(), tiers.stream())) {}

  GuardedMemory Guard(StreamHandle stream, const WaitSite& site = kFreeAfterCopy) {
    return GuardedMemory(std::move(memory), stream, copy, site);
  }

  std::shared_ptr<HostBuffer> host;
  DeviceMemory memory;
  Transfer copy;
};

class GuardedMemoryTest : public ::testing::Test {
 protected:
  ~GuardedMemoryTest() override { EXPECT_THAT(world_.machine().races(), races_); }

  CopyOut NewCopyOut(uint64_t seed) { return CopyOut(world_, tiers_, seed); }
  GuardedMemory NewGuarded(uint64_t seed) { return NewCopyOut(seed).Guard(tiers_.stream()); }
  // Returns the stream waits since the last call.
  uint64_t NewWaits() {
    const uint64_t waits = world_.engine().GetStats().event_waits;
    return waits - std::exchange(waits_seen_, waits);
  }

  EngineWorld world_;
  ::testing::Matcher<std::vector<std::string>> races_ = IsEmpty();  // at the end
  TierWorld tiers_{world_};
  uint64_t waits_seen_ = 0;
};

// ---------------------------------------------------------------------------------------- order

// The next owner of the memory writes to it at once.
TEST_F(GuardedMemoryTest, TheStreamWaitsForACopyOutBeforeTheFrameworkGetsTheMemoryBack) {
  for (const WaitSite* const site : {&kFreeAfterCopy, &kReuseAfterCopyOut}) {
    CopyOut out = NewCopyOut(1);
    const void* const data = out.memory.data();
    EXPECT_FALSE(out.copy.IsDone());
    { const GuardedMemory guarded = out.Guard(tiers_.stream(), *site); }
    EXPECT_EQ(tiers_.live_blocks(), 0);
    const DeviceMemory next = tiers_.NewMemory(Pattern(2, kBytes));
    EXPECT_EQ(next.data(), data) << "or nothing was at stake";
    ASSERT_THAT(out.copy.Wait(kLong), IsOk());
    EXPECT_EQ(world_.ReadHost(*out.host), Pattern(1, kBytes));
  }
}

TEST_F(GuardedMemoryTest, TheStreamWaitsForACopyInBeforeTheFrameworkGetsTheMemoryBack) {
  const std::shared_ptr<HostBuffer> host = world_.NewHostBuffer(Pattern(1, kBytes));
  DeviceMemory memory = tiers_.NewMemory(kBytes);
  const Transfer copy = world_.CopyIn(host, memory.data(), tiers_.stream());
  { const GuardedMemory guarded(std::move(memory), tiers_.stream(), copy, kFreeAfterCopy); }
  const DeviceMemory next = tiers_.NewMemory(Pattern(2, kBytes));
  ASSERT_THAT(copy.Wait(kLong), IsOk());
  EXPECT_EQ(tiers_.BytesIn(next), Pattern(2, kBytes));
}

TEST_F(GuardedMemoryTest, WithoutTheWaitTheFreeIsARace) {
  const ScopedDisableWaitSite disabled(kFreeAfterCopy);
  { const GuardedMemory guarded = NewGuarded(1); }
  races_ = ElementsAre(AllOf(HasSubstr("the free"), HasSubstr("copy D2H")));
}

TEST_F(GuardedMemoryTest, TheWaitIsAtTheSiteThatWasGiven) {
  const ScopedDisableWaitSite disabled(kFreeAfterCopy);
  {
    GuardedMemory evicted;
    evicted = NewCopyOut(1).Guard(tiers_.stream(), kReuseAfterCopyOut);
  }
  EXPECT_EQ(NewWaits(), 2u) << "the copy for compute, and compute for the copy";
}

TEST_F(GuardedMemoryTest, ItIsSafeToLetGoOnAnyThread) {
  std::optional<GuardedMemory> guarded = NewGuarded(1);
  std::thread([&] { guarded.reset(); }).join();
  EXPECT_EQ(tiers_.live_blocks(), 0);
}

TEST_F(GuardedMemoryTest, ACopyThatIsKnownToBeDoneIsNotWaitedFor) {
  CopyOut out = NewCopyOut(1);
  ASSERT_THAT(out.copy.Wait(kLong), IsOk());
  NewWaits();
  { const GuardedMemory guarded = out.Guard(tiers_.stream()); }
  EXPECT_EQ(NewWaits(), 0u);
  EXPECT_EQ(tiers_.live_blocks(), 0);
}

TEST_F(GuardedMemoryTest, MemoryThatOthersHoldStays) {
  CopyOut out = NewCopyOut(1);
  const DeviceMemory others = out.memory.Share();
  { const GuardedMemory guarded = out.Guard(tiers_.stream()); }
  EXPECT_EQ(tiers_.live_blocks(), 1);
  EXPECT_EQ(tiers_.BytesIn(others), Pattern(1, kBytes));
}

// --------------------------------------------------------------------------------------- values

TEST_F(GuardedMemoryTest, DisarmedMemoryGoesWithoutAWait) {
  CopyOut out = NewCopyOut(1);
  ASSERT_THAT(out.copy.WaitOn(tiers_.stream(), kReuseAfterCopyOut), IsOk());
  GuardedMemory guarded = out.Guard(tiers_.stream());
  NewWaits();
  guarded.Disarm();
  EXPECT_FALSE(guarded);
  EXPECT_EQ(tiers_.live_blocks(), 0);
  EXPECT_EQ(NewWaits(), 0u);
}

TEST_F(GuardedMemoryTest, WhoDisarmsWithoutHavingWaitedHasARace) {
  NewGuarded(1).Disarm();
  races_ = Not(IsEmpty());
}

TEST_F(GuardedMemoryTest, WhatWasMovedFromIsEmptyAndWaitsForNothing) {
  GuardedMemory from = NewGuarded(1);
  NewWaits();
  {
    const GuardedMemory to = std::move(from);
    EXPECT_FALSE(from);
    EXPECT_TRUE(to);
    EXPECT_EQ(to.stream(), tiers_.stream());
    EXPECT_EQ(tiers_.BytesIn(to.memory()), Pattern(1, kBytes));
  }
  EXPECT_EQ(NewWaits(), 1u);
  from = GuardedMemory();
  EXPECT_EQ(NewWaits(), 0u);
  EXPECT_EQ(tiers_.live_blocks(), 0);
}

TEST_F(GuardedMemoryTest, AssigningLetsGoOfWhatWasThereAfterItsOwnCopy) {
  GuardedMemory guarded = NewGuarded(1);
  GuardedMemory next = NewGuarded(2);
  NewWaits();
  guarded = std::move(next);
  EXPECT_EQ(NewWaits(), 1u);
  EXPECT_EQ(tiers_.live_blocks(), 1);
  EXPECT_EQ(tiers_.BytesIn(guarded.memory()), Pattern(2, kBytes));
}

TEST_F(GuardedMemoryTest, OneWaitCoversAllMemoryUnderOneCopy) {
  CopyOut out = NewCopyOut(1);
  DeviceMemory more = tiers_.NewMemory(kBytes);
  NewWaits();
  {
    GuardedMemory guarded = out.Guard(tiers_.stream());
    guarded.Add(std::move(more));
  }
  EXPECT_EQ(NewWaits(), 1u);
  EXPECT_EQ(tiers_.live_blocks(), 0);
}

TEST_F(GuardedMemoryTest, OneWaitForTheLaterCopyCoversTheEarlierInWhateverOrderTheyAreAdded) {
  for (const bool later_first : {false, true}) {
    GuardedMemory earlier = NewGuarded(1);
    GuardedMemory later = NewGuarded(2);
    NewWaits();
    {
      GuardedMemory both = std::move(later_first ? later : earlier);
      both.Add(std::move(later_first ? earlier : later));
    }
    EXPECT_EQ(NewWaits(), 1u);
    EXPECT_EQ(tiers_.live_blocks(), 0);
  }
}

TEST_F(GuardedMemoryTest, TheFirstOfItsMemoryStandsForIt) {
  CopyOut out = NewCopyOut(1);
  DeviceMemory more = tiers_.NewMemory(Pattern(2, kBytes));
  const void* const first = out.memory.data();
  GuardedMemory guarded = out.Guard(tiers_.stream());
  guarded.Add(std::move(more));
  EXPECT_EQ(guarded.memory().data(), first);
}

TEST_F(GuardedMemoryTest, NeighboursOfOneStreamAreMergedAndEmptyOnesLeftOut) {
  const StreamHandle other = world_.NewStream();
  ASSERT_THAT(world_.engine().OrderStreams(tiers_.stream(), other, kAfterOtherStream), IsOk());
  GuardedMemories merged;
  for (const StreamHandle stream :
       {tiers_.stream(), tiers_.stream(), other, other, tiers_.stream()}) {
    AddByStream(NewCopyOut(1).Guard(stream), merged);
    AddByStream(GuardedMemory(), merged);
  }
  NewWaits();
  std::vector<StreamHandle> streams;
  for (const GuardedMemory& memory : merged) streams.push_back(memory.stream());
  EXPECT_THAT(streams, ElementsAre(tiers_.stream(), other, tiers_.stream()));
  EXPECT_EQ(tiers_.live_blocks(), 5);
  merged.erase(merged.begin());
  EXPECT_EQ(NewWaits(), 1u);
  EXPECT_EQ(tiers_.live_blocks(), 3);
}

// --------------------------------------------------------------------------------------- faults

struct FaultyTierWorld : FaultyWorld {
  FaultyTierWorld() : FaultyWorld(WithoutRetries()), tiers(*this) {}
  TierWorld tiers;
};

TEST(GuardedMemoryFaultsTest, WhereTheWaitCannotBeEnqueuedOrTheStreamCapturesTheHostWaits) {
  for (const bool captures : {false, true}) {
    SCOPED_TRACE(captures ? "the stream captures" : "the wait fails");
    FaultyTierWorld world;
    CopyOut out(world, world.tiers, 1);
    if (!captures) world.FailNext("StreamWaitEvent", Injected());
    ASSERT_THAT(world.machine().SetCapturing(world.tiers.stream(), captures), IsOk());
    { const GuardedMemory guarded = out.Guard(world.tiers.stream()); }
    EXPECT_TRUE(out.copy.IsDone());
    EXPECT_EQ(world.tiers.live_blocks(), 0);
    EXPECT_THAT(world.machine().races(), IsEmpty());
    EXPECT_THAT(world.log.text(), IsEmpty());
  }
}

TEST(GuardedMemoryFaultsTest, MemoryUnderACopyOfAPoisonedEngineIsLeakedAndTheLogSaysSo) {
  FaultyTierWorld world;
  CopyOut out(world, world.tiers, 1);
  DeviceMemory more = world.tiers.NewMemory(kBytes);
  world.FailNext("StreamWaitEvent", absl::InternalError("the device is gone"));
  {
    GuardedMemory guarded = out.Guard(world.tiers.stream());
    guarded.Add(std::move(more));
  }
  EXPECT_EQ(world.tiers.live_blocks(), 2);
  EXPECT_THAT(world.log.text(), AllOf(HasSubstr("leaking 131072 bytes of device memory"),
                                      HasSubstr("the device is gone")));
}

// ------------------------------------------------------------------------------------------ exit

// Globals, as in a program: destroyed after main.
std::unique_ptr<EngineWorld> global_world;
std::unique_ptr<TierWorld> global_tiers;
GuardedMemory global_memory;

// Exits with a copy in flight. Exits with 3 if the device is called during exit, even to free.
[[noreturn]] void ExitWithGuardedMemory() {
  const std::shared_ptr<EmulatedMachine> machine = *EmulatedMachine::Create(TestMachineOptions());
  auto device = std::make_shared<ForwardingDevice>(machine->device(0));
  device->FailCalls([](const std::string&, uint64_t) {
    if (ProcessIsExiting()) _exit(3);
    return absl::OkStatus();
  });
  global_world = std::make_unique<EngineWorld>(machine, device, EngineOptions());
  global_tiers = std::make_unique<TierWorld>(*global_world);
  global_memory = CopyOut(*global_world, *global_tiers, 1).Guard(global_tiers->stream());
  std::exit(0);
}

// The operating system reclaims the memory, so no message is needed.
TEST(GuardedMemoryDeathTest, MemoryThatOutlivesMainIsLeakedWithoutADeviceCallOrAWord) {
  EXPECT_EXIT(ExitWithGuardedMemory(), ::testing::ExitedWithCode(0),
              Not(HasSubstr("device memory")));
}

}  // namespace guarded_memory_test
}  // namespace pinion::testing
