// Protected host pages of copies in flight: which accesses fault, and until when.

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/tests/device/emulated/emulated_fixture.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace host_protection_test {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kPage = 4 * kKiB;

// Accesses that the compiler cannot optimize away.
uint8_t Read(const uint8_t* data) { return *static_cast<const volatile uint8_t*>(data); }
void Write(uint8_t* data, uint8_t value) { *static_cast<volatile uint8_t*>(data) = value; }

class HostProtectionTest : public EmulatedFixture {
 protected:
  static EmulatedOptions Protected(EffectSchedule schedule = EffectSchedule::kLate) {
    EmulatedOptions options = Options();
    options.schedule = schedule;
    options.protect_host_pages = true;
    return options;
  }
  HostProtectionTest() { Start(Protected()); }

  void Start(const EmulatedOptions& options) {
    EmulatedFixture::Start(options);
    host_ = Pinned(4 * kPage);
    std::memset(host_, 1, 4 * kPage);
    there_ = OnDevice(4 * kPage);
    Fill(there_, 7, 4 * kPage, compute_);
  }

  // Copies the bytes [begin, end) between host_ and there_.
  void Out(uint64_t begin, uint64_t end) {
    ASSERT_THAT(ToHost(host_ + begin, there_ + begin, end - begin, compute_), IsOk());
  }
  void In(uint64_t begin, uint64_t end) {
    ASSERT_THAT(ToDevice(there_ + begin, host_ + begin, end - begin, compute_), IsOk());
  }

  uint8_t* host_ = nullptr;
  uint8_t* there_ = nullptr;
};

using HostProtectionDeathTest = HostProtectionTest;

TEST_F(HostProtectionDeathTest, ReadingTheDestinationOfACopyInFlightDies) {
  Out(0, 4 * kPage);
  EXPECT_DEATH(Read(host_),
               "host access to 0x[0-9a-f]+ inside copy D2H #[0-9]+ on emu:0/default, "
               "which the host has not waited for");
  EXPECT_DEATH(Read(host_ + 4 * kPage - 1), "inside copy D2H");
}

TEST_F(HostProtectionDeathTest, BytesThatHaveArrivedAreNotReadableUntilTheHostHasWaited) {
  // Such a program works by luck: the copy is complete, but the host never waited for it.
  Start(Protected(EffectSchedule::kEarly));
  Out(0, kPage);
  EXPECT_DEATH(Read(host_), "inside copy D2H");
  Synchronize(compute_);
  EXPECT_EQ(Read(host_), 7);
}

TEST_F(HostProtectionDeathTest, WritingTheSourceOfACopyInFlightDiesAndReadingItDoesNot) {
  In(0, 2 * kPage);
  EXPECT_EQ(Read(host_), 1);
  EXPECT_DEATH(Write(host_, 2), "inside copy H2D #[0-9]+ on emu:0/default");
  Synchronize(compute_);
  Write(host_, 2);
  EXPECT_EQ(Read(there_), 1);
}

TEST_F(HostProtectionTest, WaitForAnEventOpensThePages) {
  Out(0, 4 * kPage);
  ASSERT_THAT(device_->WaitEvent(Record(compute_), absl::InfiniteDuration()), IsOk());
  EXPECT_EQ(Read(host_ + kPage), 7);
  Write(host_ + kPage, 2);
  ASSERT_THAT(machine_->HostAccess(host_, 4 * kPage, /*write=*/true), IsOk());
  EXPECT_THAT(machine_->races(), IsEmpty());
}

TEST_F(HostProtectionDeathTest, QueryOpensThePagesWhenItSaysYes) {
  Out(0, 4 * kPage);
  const EventHandle event = Record(compute_);
  ASSERT_FALSE(device_->QueryEvent(event).value());
  EXPECT_DEATH(Read(host_), "inside copy D2H");
  while (!device_->QueryEvent(event).value()) {
  }
  EXPECT_EQ(Read(host_), 7);
}

TEST_F(HostProtectionDeathTest, EventRecordedBeforeACopyDoesNotOpenItsPages) {
  const EventHandle before = Record(compute_);
  Out(0, kPage);
  ASSERT_THAT(device_->WaitEvent(before, absl::InfiniteDuration()), IsOk());
  EXPECT_DEATH(Read(host_), "inside copy D2H");
}

TEST_F(HostProtectionTest, WaitForALaterStreamOpensWhatThatStreamWaitedFor) {
  Out(0, kPage);
  Order(compute_, out_);
  Synchronize(out_);
  EXPECT_EQ(Read(host_), 7);
}

TEST_F(HostProtectionDeathTest, WaitThatTimesOutOpensNothing) {
  EmulatedOptions options = Protected();
  options.faults.stall_copies_from = 1;
  Start(options);
  Out(0, kPage);
  EXPECT_THAT(device_->WaitEvent(Record(compute_), absl::Seconds(1)),
              StatusIs(absl::StatusCode::kDeadlineExceeded));
  EXPECT_DEATH(Read(host_), "inside copy D2H");
}

TEST_F(HostProtectionDeathTest, PagesThatACopySharesWithOthersStayAccessible) {
  Out(kPage - 1, 2 * kPage + 1);
  Write(host_ + kPage - 2, 2);      // next to the copy, in its first page
  Write(host_ + 2 * kPage + 1, 2);  // and in its last page
  EXPECT_DEATH(Read(host_ + kPage), "inside copy D2H");
  EXPECT_DEATH(Read(host_ + 2 * kPage - 1), "inside copy D2H");
  Out(3 * kPage + 1, 4 * kPage);  // no whole page
  Write(host_ + 3 * kPage, 2);
  Synchronize(compute_);
  EXPECT_EQ(Read(host_ + kPage - 2), 2);
  EXPECT_EQ(Read(host_ + kPage - 1), 7);
  EXPECT_EQ(Read(host_ + 2 * kPage), 7);
  EXPECT_EQ(Read(host_ + 3 * kPage), 2);
}

TEST_F(HostProtectionDeathTest, OfTwoCopiesSideBySideTheOneThatHasThePageIsNamed) {
  In(0, kPage);
  Out(kPage, 2 * kPage);
  In(2 * kPage, 3 * kPage);
  EXPECT_DEATH(Write(host_ + kPage - 1, 2), "inside copy H2D");
  EXPECT_DEATH(Write(host_ + kPage, 2), "inside copy D2H");
  EXPECT_DEATH(Write(host_ + 2 * kPage - 1, 2), "inside copy D2H");
  EXPECT_DEATH(Write(host_ + 2 * kPage, 2), "inside copy H2D");
}

TEST_F(HostProtectionDeathTest, PageOfSeveralCopiesIsOpenAfterTheLastOfThem) {
  Out(0, 2 * kPage);
  const EventHandle out = Record(compute_);
  In(kPage, 3 * kPage);
  In(kPage, 2 * kPage);
  EXPECT_DEATH(Read(host_ + kPage), "inside copy D2H");
  EXPECT_EQ(Read(host_ + 2 * kPage), 1);
  ASSERT_THAT(device_->WaitEvent(out, absl::InfiniteDuration()), IsOk());
  EXPECT_EQ(Read(host_ + kPage), 7);
  Write(host_, 2);
  EXPECT_DEATH(Write(host_ + kPage, 2), "inside copy H2D");
  EXPECT_DEATH(Write(host_ + 2 * kPage, 2), "inside copy H2D");
  Synchronize(compute_);
  Write(host_ + kPage, 2);
  Write(host_ + 2 * kPage, 2);
}

TEST_F(HostProtectionTest, CopiesTakeEffectThroughClosedPages) {
  for (const EffectSchedule schedule :
       {EffectSchedule::kEarly, EffectSchedule::kLate, EffectSchedule::kRandom}) {
    Start(Protected(schedule));
    uint8_t* const other = Pinned(4 * kPage);
    Out(0, 4 * kPage);
    Fill(there_, 8, 4 * kPage, compute_);  // forces the copy out, unseen by the host
    In(0, 4 * kPage);
    ASSERT_THAT(ToHost(other, there_, 4 * kPage, compute_), IsOk());
    Synchronize(compute_);
    EXPECT_EQ(Read(other), 7);
    EXPECT_EQ(Read(other + 4 * kPage - 1), 7);
    EXPECT_THAT(machine_->races(), IsEmpty());
  }
}

// Returns the number of mappings of emulated pinned memory: two for each segment.
int PinnedMappings() {
  std::ifstream maps("/proc/self/maps");
  int mappings = 0;
  for (std::string line; std::getline(maps, line);) {
    mappings += line.find("pinion emulated pinned memory") != std::string::npos;
  }
  return mappings;
}

TEST_F(HostProtectionTest, SegmentMayBeUnpinnedWhileItIsClosed) {
  const int mappings = PinnedMappings();
  Out(0, 4 * kPage);
  ASSERT_THAT(source_->Free({host_, 4 * kPage, -1}), IsOk());
  EXPECT_THAT(machine_->races(), ElementsAre(HasSubstr("the unpinning")));
  EXPECT_EQ(PinnedMappings(), mappings - 2);
  uint8_t* const next = Pinned(4 * kPage);
  Write(next, 1);
  Synchronize(compute_);
  EXPECT_EQ(Read(next), 1);
}

TEST_F(HostProtectionTest, MachineThatGoesAwayLeavesThePagesOpen) {
  Out(0, 4 * kPage);
  source_.reset();
  device_.reset();
  machine_.reset();
  EXPECT_EQ(Read(host_), 1);
  munmap(host_, 4 * kPage);
}

TEST_F(HostProtectionDeathTest, DoesNotNeedTheRaceDetector) {
  EmulatedOptions options = Protected();
  options.detect_races = false;
  Start(options);
  Out(0, kPage);
  EXPECT_DEATH(Read(host_), "inside copy D2H");
  Synchronize(compute_);
  EXPECT_EQ(Read(host_), 7);
}

TEST_F(HostProtectionDeathTest, MoreCopiesThanTheHandlerCanNameAreStillProtected) {
  for (int i = 0; i < 1000; ++i) Out(0, kPage);
  Out(kPage, 2 * kPage);
  EXPECT_DEATH(Read(host_ + kPage), "");
  Synchronize(compute_);
  EXPECT_EQ(Read(host_), 7);
  EXPECT_EQ(Read(host_ + kPage), 7);
}

TEST_F(HostProtectionTest, IsOffUnlessAskedFor) {
  EXPECT_FALSE(EmulatedOptions().protect_host_pages);
  Start(Options());
  Out(0, 4 * kPage);
  EXPECT_EQ(Read(host_), 1);  // too early; only the race detector would notice
  Write(host_, 2);
  Synchronize(compute_);
  EXPECT_EQ(Read(host_), 7);
}

}  // namespace host_protection_test
}  // namespace pinion
