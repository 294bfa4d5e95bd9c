// Twice-mapped memory, and closing and opening its pages without a machine.

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/host_protection.h"
#include "pinion/device/emulated/race_detector.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace host_protection_segments_test {

using ::pinion::testing::StatusIs;
using ::testing::HasSubstr;

constexpr uint64_t kPage = 4 * kKiB;

// Accesses that the compiler cannot optimize away.
uint8_t Read(const uint8_t* data) { return *static_cast<const volatile uint8_t*>(data); }
void Write(uint8_t* data, uint8_t value) { *static_cast<volatile uint8_t*>(data) = value; }

TEST(MapTwiceTest, BothViewsAreTheSameMemory) {
  const TwoViews views = MapTwice(2 * kPage).value();
  EXPECT_NE(views.program, views.machine);
  std::memset(views.program, 3, 2 * kPage);
  EXPECT_EQ(Read(static_cast<uint8_t*>(views.machine) + 2 * kPage - 1), 3);
  munmap(views.program, 2 * kPage);
  munmap(views.machine, 2 * kPage);
}

// Tests Close and Open alone, on two adjacent segments of one page and a page outside segments.
class SegmentsTest : public ::testing::Test {
 protected:
  SegmentsTest() {
    for (const uint64_t offset : {uint64_t{0}, kPage}) {
      protection_.AddSegment({Program(offset), Machine(offset)}, kPage);
    }
  }

  uint8_t* Program(uint64_t offset) {
    return static_cast<uint8_t*>(mapping_.views.program) + offset;
  }
  uint8_t* Machine(uint64_t offset) {
    return static_cast<uint8_t*>(mapping_.views.machine) + offset;
  }
  // Closes [begin, end) for a copy from unprotected memory, and returns the copy's target.
  void* Close(uint64_t begin, uint64_t end, uint64_t epoch = 1) {
    return protection_.Close({Program(begin), &elsewhere_, end - begin}, {1, epoch}, "a copy").dst;
  }

  void LetHostSee(uint64_t epoch) {
    VectorClock host;
    host.Set(1, epoch);
    protection_.OpenSeen(host);
  }

  struct Mapping {
    const TwoViews views = MapTwice(3 * kPage).value();
    ~Mapping() { munmap(views.program, 3 * kPage); }
  } mapping_;
  HostProtection protection_;
  char elsewhere_ = 0;
};
using SegmentsDeathTest = SegmentsTest;

TEST_F(SegmentsDeathTest, ARemovedSegmentOpensItsOwnPagesAndNotItsNeighbours) {
  EXPECT_EQ(Close(0, kPage), Machine(0));
  EXPECT_EQ(Close(kPage, 2 * kPage), Machine(kPage));
  EXPECT_EQ(protection_.RemoveSegment(Program(0)), Machine(0));
  Write(Program(0), 1);
  EXPECT_DEATH(Read(Program(kPage)), "inside a copy");
  EXPECT_DEATH(protection_.RemoveSegment(Program(0)), "segments_.end");
}

TEST_F(SegmentsDeathTest, ARemovedSegmentDoesNotOpenTheOneBelowIt) {
  Close(0, kPage);
  EXPECT_EQ(protection_.RemoveSegment(Program(kPage)), Machine(kPage));
  EXPECT_DEATH(Read(Program(0)), "inside a copy");
}

TEST_F(SegmentsTest, WhatIsNotInsideOneSegmentIsLeftAlone) {
  EXPECT_EQ(Close(2 * kPage, 3 * kPage), Program(2 * kPage));
  EXPECT_EQ(Close(kPage, 3 * kPage), Program(kPage));
  protection_.RemoveSegment(Program(0));
  EXPECT_EQ(Close(0, kPage), Program(0));
  for (uint64_t page = 0; page < 3; ++page) Write(Program(page * kPage), 1);
}

TEST_F(SegmentsDeathTest, ACopyThatTheHostHasSeenTakesNoOtherCopysNameAway) {
  Close(0, kPage, 5);
  Close(kPage, 2 * kPage, 4);
  LetHostSee(4);
  EXPECT_DEATH(Read(Program(0)), "inside a copy");
}

TEST_F(SegmentsDeathTest, FiveHundredAndTwelveCopiesHaveNamesAndOneMoreTakesNoneAway) {
  protection_.AddSegment({Program(2 * kPage), Machine(2 * kPage)}, kPage);
  Close(0, kPage, 2);
  for (int copy = 1; copy < 511; ++copy) Close(kPage, 2 * kPage, 2);
  Close(2 * kPage, 3 * kPage, 2);
  Close(kPage, 2 * kPage, 1);
  EXPECT_DEATH(Read(Program(2 * kPage)), "inside a copy");
  LetHostSee(1);
  EXPECT_DEATH(Read(Program(0)), "inside a copy");
}

TEST_F(SegmentsDeathTest, TheNameOfACopyThatTheHostHasSeenIsFreeForAnother) {
  for (uint64_t epoch = 1; epoch <= 1000; ++epoch) {
    Close(0, kPage, epoch);
    LetHostSee(epoch);
  }
  Close(0, kPage, 1001);
  EXPECT_DEATH(Read(Program(0)), "inside a copy");
}

TEST_F(SegmentsDeathTest, AFaultOfAPageThatIsGoneIsNotClaimed) {
  Close(0, kPage);
  EXPECT_DEATH(
      {
        munmap(Program(0), kPage);
        std::fputs("unmapped\n", stderr);
        Read(Program(0));
      },
      ::testing::AllOf(HasSubstr("unmapped"), ::testing::Not(HasSubstr("pinion: host"))));
}

// Faults just below and just above the copy. The closed page belonged to another copy earlier.
TEST_F(SegmentsDeathTest, AFaultBesideACopyIsNotClaimed) {
  Close(0, kPage, 1);
  LetHostSee(1);
  Close(kPage, 2 * kPage, 2);
  EXPECT_DEATH(Read(Program(kPage)), "inside a copy");
  for (const uint64_t offset : {uint64_t{0}, 2 * kPage}) {
    EXPECT_DEATH(
        {
          mprotect(Program(offset), kPage, PROT_NONE);
          std::fputs("closed by somebody else\n", stderr);
          Read(Program(offset));
        },
        ::testing::AllOf(HasSubstr("closed by somebody else"),
                         ::testing::Not(HasSubstr("pinion: host"))));
  }
}

TEST_F(SegmentsDeathTest, TheMessageHasTheWholeAddress) {
  Close(0, kPage);
  char address[32];
  std::snprintf(address, sizeof(address), "0x%016zx inside",
                reinterpret_cast<size_t>(Program(kPage - 1)));
  EXPECT_DEATH(Read(Program(kPage - 1)), address);
}

TEST_F(SegmentsDeathTest, ALongNameIsCutOff) {
  protection_.Close({Program(0), &elsewhere_, kPage}, {1, 1}, std::string(200, 'x'));
  EXPECT_DEATH(Read(Program(0)), "inside x{95}, which");
}

TEST_F(SegmentsDeathTest, ASignalThatSomebodySendsStillEndsTheProcess) {
  EXPECT_DEATH(
      {
        raise(SIGSEGV);
        _exit(0);
      },
      "");
  EXPECT_DEATH(
      {
        kill(getpid(), SIGSEGV);  // as from another process
        _exit(0);
      },
      "");
}

// Maps with address space for only one more view. Exits with 0 if that space is free afterwards.
[[noreturn]] void MapTwiceWithRoomForOne() {
  constexpr uint64_t kSize = uint64_t{1} << 32;
  uint64_t mapped_pages = 0;
  std::ifstream("/proc/self/statm") >> mapped_pages;
  rlimit limit;
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = mapped_pages * kPage + kSize * 3 / 2;
  setrlimit(RLIMIT_AS, &limit);
  std::fputs(std::string(MapTwice(kSize).status().message()).c_str(), stderr);
  const void* const again =
      mmap(nullptr, kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  _exit(again == MAP_FAILED ? 1 : 0);
}

TEST(MapTwiceDeathTest, AViewThatHasNoPartnerIsGivenBack) {
  EXPECT_EXIT(MapTwiceWithRoomForOne(), ::testing::ExitedWithCode(0), "the second");
}

// Returns the number that the process's next opened file would get.
int NextFile() {
  const int file = dup(STDERR_FILENO);
  close(file);
  return file;
}

TEST(MapTwiceTest, NoFileStaysOpen) {
  const int next = NextFile();
  const TwoViews views = MapTwice(kPage).value();
  EXPECT_EQ(NextFile(), next);
  munmap(views.program, kPage);
  munmap(views.machine, kPage);
  EXPECT_FALSE(MapTwice(uint64_t{1} << 60).ok());
  EXPECT_EQ(NextFile(), next);
}

TEST(MapTwiceTest, AProcessThatHasClosedItsInputMapsAsWell) {
  const int input = dup(STDIN_FILENO);
  close(STDIN_FILENO);
  const absl::StatusOr<TwoViews> views = MapTwice(kPage);
  dup2(input, STDIN_FILENO);
  close(input);
  ASSERT_TRUE(views.ok()) << views.status();
  munmap(views->program, kPage);
  munmap(views->machine, kPage);
}

TEST(MapTwiceTest, AProcessWithoutRoomForAFileIsToldWhatFailed) {
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none = {0, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status status = MapTwice(kPage).status();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted,
                               HasSubstr("memfd_create: Too many open files")));
}

TEST(MapTwiceTest, MemoryThatTheHostDoesNotHaveIsAnErrorThatNamesTheSize) {
  EXPECT_THAT(MapTwice(uint64_t{1} << 60),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       ::testing::AllOf(HasSubstr(HumanBytes(uint64_t{1} << 60)),
                                        HasSubstr("the first view"))));
}

}  // namespace host_protection_segments_test
}  // namespace pinion
