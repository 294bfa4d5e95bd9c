// Disables the engine's waits one at a time. Each must make a test program fail.

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/copy_lane.h"
#include "pinion/engine/stream/stream_timeline.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/faulty_world.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace wait_site_mutation_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr absl::Duration kLong = absl::Seconds(30);

EmulatedOptions WithoutDetector() {
  EmulatedOptions options = TestMachineOptions();
  options.detect_races = false;
  options.schedule = EffectSchedule::kLate;
  return options;
}

// Copies out a tensor that compute has just written.
void CopyOutWhatAKernelWrote(EngineWorld& world) {
  uint8_t* const data = world.AllocateDevice(kKiB);
  const StreamHandle stream = world.NewStream();
  ASSERT_THAT(world.engine().OrderStreams(world.compute(), stream, kAfterOtherStream), IsOk());
  world.WriteDevice(data, Pattern(1, kKiB), stream);
  world.CopyOut(world.NewHostBuffer(kKiB), data, stream);
}

TEST(WaitSiteMutationTest, ACopyThatDoesNotWaitForComputeIsARace) {
  {
    EngineWorld world;
    CopyOutWhatAKernelWrote(world);
    EXPECT_THAT(world.machine().races(), IsEmpty());
  }
  ScopedDisableWaitSite disabled(pinion::internal::kCopyAfterCompute);
  EngineWorld world;
  CopyOutWhatAKernelWrote(world);
  // The copy does not wait for the allocation either, which is the same missing edge.
  EXPECT_THAT(world.machine().races(), Contains(AllOf(HasSubstr("copy D2H"), HasSubstr("write #"),
                                                      HasSubstr("Missing edge"))));
}

// Returns the host's bytes after a copy out whose source is written by another copy on `compute`.
std::vector<uint8_t> CopyOutWhatACopyWrote(EngineWorld& world) {
  const std::shared_ptr<HostBuffer> source = world.NewHostBuffer(Pattern(1, kKiB));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(Pattern(2, kKiB));
  uint8_t* const data = world.AllocateDevice(Pattern(3, kKiB));
  EXPECT_THAT(world.machine().Copy(0, data, source->data(), kKiB, world.compute()), IsOk());
  const Transfer out = world.CopyOut(host, data);
  EXPECT_THAT(out.Wait(kLong), IsOk());
  return world.ReadHost(*host);
}

TEST(WaitSiteMutationTest, ACopyThatDoesNotWaitForComputeMovesStaleBytes) {
  {
    EngineWorld world(WithoutDetector());
    EXPECT_EQ(CopyOutWhatACopyWrote(world), Pattern(1, kKiB));
  }
  ScopedDisableWaitSite disabled(pinion::internal::kCopyAfterCompute);
  EngineWorld world(WithoutDetector());
  EXPECT_EQ(CopyOutWhatACopyWrote(world), Pattern(3, kKiB));
}

// Copies a tensor out and in again through the same block.
std::vector<uint8_t> OutAndBack(EngineWorld& world) {
  uint8_t* const from = world.AllocateDevice(Pattern(1, kKiB));
  uint8_t* const to = world.AllocateDevice(kKiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(Pattern(2, kKiB));
  world.CopyOut(host, from);
  const Transfer in = world.CopyIn(host, to);
  EXPECT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsOk());
  return world.ReadDevice(to, kKiB);
}

TEST(WaitSiteMutationTest, ACopyInThatDoesNotWaitForTheCopyOutIsARace) {
  ScopedDisableWaitSite disabled(pinion::internal::kCopyAfterHostBuffer);
  EngineWorld world;
  OutAndBack(world);
  EXPECT_THAT(world.machine().races(),
              ElementsAre(AllOf(HasSubstr("copy H2D"), HasSubstr("copy D2H"),
                                HasSubstr("pinion H2D must wait for an event"))));
}

TEST(WaitSiteMutationTest, ACopyInThatDoesNotWaitForTheCopyOutMovesStaleBytes) {
  {
    EngineWorld world(WithoutDetector());
    EXPECT_EQ(OutAndBack(world), Pattern(1, kKiB));
  }
  ScopedDisableWaitSite disabled(pinion::internal::kCopyAfterHostBuffer);
  EngineWorld world(WithoutDetector());
  EXPECT_EQ(OutAndBack(world), Pattern(2, kKiB));
}

// Returns the host's bytes after a copy out whose event could not be recorded.
std::vector<uint8_t> CopyOutWithoutAnEvent(FaultyWorld& world) {
  uint8_t* const data = world.AllocateDevice(Pattern(1, kKiB));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(Pattern(2, kKiB));
  world.FailCall("RecordEvent", 2, Injected());
  const Transfer out = world.CopyOut(host, data);
  EXPECT_TRUE(out.IsDone());
  return world.ReadHost(*host);
}

TEST(WaitSiteMutationTest, ACopyWithoutAnEventThatIsNotWaitedForIsARace) {
  ScopedDisableWaitSite disabled(pinion::internal::kCopyWithoutEvent);
  FaultyWorld world(WithoutRetries());
  CopyOutWithoutAnEvent(world);
  EXPECT_THAT(world.machine().races(),
              Contains(AllOf(HasSubstr("copy D2H"), HasSubstr("host access"))));
}

TEST(WaitSiteMutationTest, ACopyWithoutAnEventThatIsNotWaitedForHasNotArrived) {
  {
    FaultyWorld world(WithoutRetries(), WithoutDetector());
    EXPECT_EQ(CopyOutWithoutAnEvent(world), Pattern(1, kKiB));
  }
  ScopedDisableWaitSite disabled(pinion::internal::kCopyWithoutEvent);
  FaultyWorld world(WithoutRetries(), WithoutDetector());
  EXPECT_EQ(CopyOutWithoutAnEvent(world), Pattern(2, kKiB));
}

// Makes a batch fail at its second chunk, then fills the buffer with Pattern(2). Returns the host's
// bytes when everything is done.
std::vector<uint8_t> ReuseTheBufferOfAFailedBatch(FaultyWorld& world) {
  uint8_t* const data = world.AllocateDevice(Pattern(1, kKiB));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kKiB);
  world.FailCall("CopyAsync", 2, Injected());
  EXPECT_THAT(world.TryCopyOut(host, data), Not(IsOk()));
  world.WriteHost(*host, Pattern(2, kKiB));
  EXPECT_THAT(world.machine().SynchronizeDevice(0), IsOk());
  return world.ReadHost(*host);
}

EngineOptions SmallChunks() { return Chunks(kKiB / 2, WithoutRetries()); }

TEST(WaitSiteMutationTest, AFailedBatchThatIsNotWaitedForIsARace) {
  ScopedDisableWaitSite disabled(pinion::internal::kFailedBatch);
  FaultyWorld world(SmallChunks());
  ReuseTheBufferOfAFailedBatch(world);
  EXPECT_THAT(world.machine().races(),
              Contains(AllOf(HasSubstr("copy D2H"), HasSubstr("host access"))));
}

TEST(WaitSiteMutationTest, AFailedBatchThatIsNotWaitedForOverwritesItsBuffer) {
  {
    FaultyWorld world(SmallChunks(), WithoutDetector());
    EXPECT_EQ(ReuseTheBufferOfAFailedBatch(world), Pattern(2, kKiB));
  }
  ScopedDisableWaitSite disabled(pinion::internal::kFailedBatch);
  FaultyWorld world(SmallChunks(), WithoutDetector());
  EXPECT_NE(ReuseTheBufferOfAFailedBatch(world), Pattern(2, kKiB));
}

}  // namespace wait_site_mutation_test
}  // namespace pinion::testing
