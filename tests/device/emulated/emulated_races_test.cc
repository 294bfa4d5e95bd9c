// Missing synchronization: each test omits one dependency of a correct program.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/emulated/emulated_fixture.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOk;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// One step of activation offload, with a switch for each of its waits.
struct Waits {
  bool out_after_compute = true;
  bool free_after_out = true;
  bool in_after_allocation = true;
  bool in_after_out = true;
  bool compute_after_in = true;
  bool host_after_in = true;
};

class EmulatedRacesTest : public EmulatedFixture {
 protected:
  EmulatedRacesTest() { Start(Options()); }

  std::vector<std::string> RacesOf(const Waits& waits, EffectSchedule schedule) {
    EmulatedOptions options = Options();
    options.schedule = schedule;
    Start(options);
    uint8_t* const host = Pinned(kMiB);
    uint8_t* const saved = OnDevice(kMiB);
    Fill(saved, 1, kMiB, compute_);
    if (waits.out_after_compute) Order(compute_, out_);
    EXPECT_THAT(ToHost(host, saved, kMiB, out_), IsOk());
    if (waits.free_after_out) Order(out_, compute_);
    EXPECT_THAT(Free(saved), IsOk());
    uint8_t* const fetched = OnDevice(kMiB);
    if (waits.in_after_allocation) Order(compute_, in_);
    if (waits.in_after_out) Order(out_, in_);
    EXPECT_THAT(ToDevice(fetched, host, kMiB, in_), IsOk());
    if (waits.compute_after_in) Order(in_, compute_);
    EXPECT_THAT(machine_->PrepareKernel(0, compute_), IsOk());
    Launch("backward", {{fetched, kMiB}}, {}, compute_);
    const EventHandle done = Record(in_);
    if (waits.host_after_in) {
      EXPECT_THAT(device_->WaitEvent(done, absl::InfiniteDuration()), IsOk());
    }
    EXPECT_THAT(machine_->HostAccess(host, kMiB, /*write=*/true), IsOk());
    return machine_->races();
  }

  void ExpectRace(const Waits& waits, const std::string& waiter, const std::string& cause) {
    for (const EffectSchedule schedule :
         {EffectSchedule::kEarly, EffectSchedule::kLate, EffectSchedule::kRandom}) {
      EXPECT_THAT(
          RacesOf(waits, schedule),
          Contains(AllOf(HasSubstr("Missing edge: " + waiter + " must wait"), HasSubstr(cause))));
    }
  }
};

TEST_F(EmulatedRacesTest, CompleteProgramIsSilent) {
  EXPECT_THAT(RacesOf({}, EffectSchedule::kLate), IsEmpty());
}

TEST_F(EmulatedRacesTest, CopyOutThatDoesNotWaitForItsProducer) {
  // An offload copy raced with the attention kernel that wrote its source (sglang#21631).
  ExpectRace({.out_after_compute = false}, "emu:0/d2h", "fill #");
}

TEST_F(EmulatedRacesTest, FreeThatDoesNotWaitForTheCopyOut) {
  ExpectRace({.free_after_out = false}, "emu:0/default", "copy D2H #");
}

TEST_F(EmulatedRacesTest, CopyInThatDoesNotWaitForItsDestinationsAllocation) {
  ExpectRace({.in_after_allocation = false, .in_after_out = false}, "emu:0/h2d",
             "the allocation #");
}

TEST_F(EmulatedRacesTest, CopyInThatDoesNotWaitForTheCopyOutOfItsBlock) {
  ExpectRace({.free_after_out = false, .in_after_out = false}, "emu:0/h2d", "copy D2H #");
}

TEST_F(EmulatedRacesTest, KernelThatDoesNotWaitForTheCopyIn) {
  ExpectRace({.compute_after_in = false}, "emu:0/default", "copy H2D #");
}

TEST_F(EmulatedRacesTest, HostThatWritesABlockThatIsStillRead) {
  // Host memory was reused while an asynchronous copy still read it (cudf#22321).
  ExpectRace({.host_after_in = false}, "the host", "copy H2D #");
}

TEST_F(EmulatedRacesTest, QueryThatSaysNoOrdersNothing) {
  const auto [data, host] = MakeBuffers(kMiB);
  ASSERT_THAT(ToHost(host, data, kMiB, compute_), IsOk());
  EXPECT_FALSE(device_->QueryEvent(Record(compute_)).value());
  ASSERT_THAT(machine_->HostAccess(host, 1, /*write=*/false), IsOk());
  EXPECT_EQ(machine_->races().size(), 1u);
}

TEST_F(EmulatedRacesTest, WaitForAnEventRecordedTooEarlyOrdersNothing) {
  // The event is recorded before the work instead of after it, as in NVIDIA/cub#156.
  const auto [data, host] = MakeBuffers(kMiB);
  const EventHandle before = Record(compute_);
  Fill(data, 1, kMiB, compute_);
  ASSERT_THAT(device_->StreamWaitEvent(out_, before), IsOk());
  ASSERT_THAT(ToHost(host, data, kMiB, out_), IsOk());
  EXPECT_THAT(machine_->races(), ElementsAre(HasSubstr("fill #")));
}

TEST_F(EmulatedRacesTest, DisjointPartsOfOneAllocationMayBeUsedAtOnce) {
  const auto [data, host] = MakeBuffers(kMiB);
  Order(compute_, out_);
  ASSERT_THAT(ToHost(host, data, kMiB / 2, out_), IsOk());
  Fill(data + kMiB / 2, 1, kMiB / 2, compute_);
  EXPECT_THAT(machine_->races(), IsEmpty());
}

TEST_F(EmulatedRacesTest, ACopyInsideTheDeviceReadsItsSourceAndWritesItsDestination) {
  for (const bool source : {true, false}) {
    Start(Options());
    uint8_t* const data = OnDevice(2 * kMiB);
    Order(compute_, out_);
    Fill(source ? data : data + kMiB, 1, kMiB, compute_);
    ASSERT_THAT(machine_->Copy(0, data + kMiB, data, kMiB, out_), IsOk());
    EXPECT_THAT(machine_->races(), ElementsAre(AllOf(HasSubstr("copy D2D #"),
                                                     HasSubstr(source ? "d2h reads" : "d2h writes"),
                                                     HasSubstr("fill #"))));
  }
}

TEST_F(EmulatedRacesTest, ARaceIsReportedByTheCallThatHasIt) {
  uint8_t* const data = OnDevice(kMiB);
  Launch("make", {}, {{data, kMiB}}, compute_);
  Launch("use", {{data, kMiB}}, {}, out_);
  EXPECT_THAT(machine_->races(), ElementsAre(HasSubstr("make #")));
}

TEST_F(EmulatedRacesTest, DetectionCanBeTurnedOff) {
  EmulatedOptions options = Options();
  options.detect_races = false;
  options.abort_on_race = true;
  Start(options);
  const auto [data, host] = MakeBuffers(kMiB);
  Fill(data, 1, kMiB, compute_);
  ASSERT_THAT(ToHost(host, data, kMiB, out_), IsOk());
  EXPECT_THAT(machine_->races(), IsEmpty());
}

using EmulatedRacesDeathTest = EmulatedRacesTest;

TEST_F(EmulatedRacesDeathTest, RaceIsFatalByDefaultAndPrintsTheSeed) {
  EmulatedOptions options;
  options.memory_bytes = 64 * kMiB;
  options.seed = 4711;
  Start(options);
  const auto [data, host] = MakeBuffers(kMiB);
  Fill(data, 1, kMiB, compute_);
  EXPECT_DEATH({ (void)ToHost(host, data, kMiB, out_); },
               "emu:0/d2h must wait for an event recorded after fill.*seed 4711");
}

}  // namespace
}  // namespace pinion
