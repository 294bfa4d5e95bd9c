#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/tests/support/child_process.h"

namespace pinion {
namespace {

using ::pinion::testing::ChildProcess;

class AddressRangeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    rlimit limit = {};
    ASSERT_EQ(getrlimit(RLIMIT_AS, &limit), 0);
    if (limit.rlim_cur != RLIM_INFINITY) {
      GTEST_SKIP() << "the tests run with ulimit -v, where no addresses are set aside";
    }
  }
};

bool IsMapped(char* data) { return msync(data, 4096, MS_ASYNC) == 0; }

TEST_F(AddressRangeTest, WhatIsTakenLiesSideBySideFromAMultipleOfAGibibyteOn) {
  AddressRange range(8 * kMiB);
  char* const first = range.Take(2 * kMiB);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % kGiB, 0u);
  EXPECT_EQ(range.Take(4 * kMiB), first + 2 * kMiB);
  EXPECT_TRUE(range.Contains(first));
  EXPECT_FALSE(range.Contains(first - 1));
  EXPECT_TRUE(range.Contains(first + 8 * kMiB - 1));
  EXPECT_FALSE(range.Contains(first + 8 * kMiB));
}

TEST_F(AddressRangeTest, TheLowestStretchThatIsLongEnoughIsTaken) {
  AddressRange range(8 * kMiB);
  char* const first = range.Take(2 * kMiB);
  range.Take(2 * kMiB);
  range.Return(first);
  EXPECT_EQ(range.Take(4 * kMiB), first + 4 * kMiB);
  EXPECT_EQ(range.Take(kMiB), first);
}

TEST_F(AddressRangeTest, StretchesThatComeBackAreJoined) {
  for (const int last : {0, 1, 2}) {
    SCOPED_TRACE(last);
    AddressRange range(6 * kMiB);
    char* const data = range.Take(2 * kMiB);
    for (int i = 1; i < 3; ++i) EXPECT_EQ(range.Take(2 * kMiB), data + i * 2 * kMiB);
    for (int i = 0; i < 3; ++i) {
      if (i != last) range.Return(data + i * 2 * kMiB);
    }
    EXPECT_EQ(range.Take(6 * kMiB), nullptr);
    range.Return(data + last * 2 * kMiB);
    EXPECT_EQ(range.Take(6 * kMiB), data);
  }
}

TEST_F(AddressRangeTest, StretchesThatDoNotTouchStayApart) {
  AddressRange range(8 * kMiB);
  char* const data = range.Take(2 * kMiB);
  for (const uint64_t size_bytes : {kMiB, 2 * kMiB, kMiB, 2 * kMiB}) range.Take(size_bytes);
  range.Return(data + 6 * kMiB);
  range.Return(data);
  range.Return(data + 3 * kMiB);
  EXPECT_EQ(range.Take(3 * kMiB), nullptr);
  EXPECT_EQ(range.Take(2 * kMiB), data);
  EXPECT_EQ(range.Take(2 * kMiB), data + 3 * kMiB);
  EXPECT_EQ(range.Take(2 * kMiB), data + 6 * kMiB);
  EXPECT_EQ(range.Take(1), nullptr);
}

TEST_F(AddressRangeTest, WhatIsStillTakenOutlivesTheRange) {
  char* taken = nullptr;
  char* returned = nullptr;
  {
    AddressRange range(8 * kMiB);
    taken = range.Take(2 * kMiB);
    returned = range.Take(2 * kMiB);
    range.Return(returned);
  }
  EXPECT_TRUE(IsMapped(taken));
  EXPECT_FALSE(IsMapped(returned));
  munmap(taken, 2 * kMiB);
}

TEST_F(AddressRangeTest, AChildMayUseTheAddressesThatAreSetAside) {
  AddressRange range(8 * kMiB);
  char* const data = range.Take(8 * kMiB);
  ChildProcess child([&] {
    EXPECT_EQ(
        mmap(data, 8 * kMiB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0),
        data);
  });
  EXPECT_EQ(child.Wait(), 0);
  range.Return(data);
}

TEST_F(AddressRangeTest, MoreAddressesThanThereAreMakeAnEmptyRange) {
  AddressRange range(uint64_t{1} << 60);
  EXPECT_EQ(range.Take(kMiB), nullptr);
  EXPECT_FALSE(range.Contains(nullptr));
}

TEST_F(AddressRangeTest, ASizeThatNoAddressesHaveMakesAnEmptyRange) {
  for (const uint64_t size_bytes : {uint64_t{0}, UINT64_MAX, UINT64_MAX - kGiB + 1}) {
    AddressRange range(size_bytes);
    EXPECT_EQ(range.Take(1), nullptr) << size_bytes;
    EXPECT_FALSE(range.Contains(nullptr)) << size_bytes;
  }
  AddressRange range(8 * kMiB);
  for (const uint64_t size_bytes : {UINT64_MAX, UINT64_MAX - 4096, 8 * kMiB + 1}) {
    EXPECT_EQ(range.Take(size_bytes), nullptr) << size_bytes;
  }
}

TEST_F(AddressRangeTest, APartOfAPageCountsAsThePage) {
  const uint64_t page_bytes = sysconf(_SC_PAGESIZE);
  char* data = nullptr;
  {
    AddressRange range(2 * page_bytes - 1);
    data = range.Take(1);
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(range.Take(page_bytes), data + page_bytes);
    EXPECT_EQ(range.Take(1), nullptr);
    range.Return(data + page_bytes);
  }
  EXPECT_TRUE(IsMapped(data));
  EXPECT_FALSE(IsMapped(data + page_bytes));
  munmap(data, page_bytes);
}

using AddressRangeDeathTest = AddressRangeTest;

TEST_F(AddressRangeDeathTest, NoAddressesAndAddressesThatWereNotTakenAreNamed) {
  AddressRange range(8 * kMiB);
  EXPECT_DEATH((void)range.Take(0), "AddressRange::Take of 0 bytes; take 1 or more");
  char* const data = range.Take(4 * kMiB);
  const char* const refused = "Take did not return it, or Return had it before: return each";
  for (char* const wrong : {static_cast<char*>(nullptr), data + 2 * kMiB, data + 4 * kMiB}) {
    EXPECT_DEATH(range.Return(wrong), refused);
  }
  range.Return(data);
  EXPECT_DEATH(range.Return(data), refused);
}

TEST_F(AddressRangeTest, WhereAddressesAreLimitedNoneAreSetAside) {
  ChildProcess child([] {
    const rlimit limit = {uint64_t{1} << 60, uint64_t{1} << 60};
    ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
    AddressRange range(8 * kMiB);
    EXPECT_EQ(range.Take(2 * kMiB), nullptr);
  });
  EXPECT_EQ(child.Wait(), 0);
}

}  // namespace
}  // namespace pinion
