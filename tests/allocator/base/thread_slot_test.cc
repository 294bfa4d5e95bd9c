#include "pinion/allocator/base/thread_slot.h"

#include <barrier>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/tests/support/run_threads.h"

namespace pinion {
namespace {

using ::pinion::testing::RunThreads;

int SlotOfNewThread() {
  int slot = -1;
  std::thread([&] { slot = ThreadSlot(); }).join();
  return slot;
}

TEST(ThreadSlotTest, AThreadKeepsItsNumber) {
  const int slot = ThreadSlot();
  EXPECT_EQ(ThreadSlot(), slot);
  EXPECT_NE(SlotOfNewThread(), slot);
  EXPECT_EQ(ThreadSlot(), slot);
}

TEST(ThreadSlotTest, AThreadThatHasNotAskedHasNoNumber) {
  std::thread([] {
    EXPECT_EQ(ThreadSlotIfAny(), kNoThreadSlot);
    EXPECT_EQ(ThreadSlotIfAny(), kNoThreadSlot);
    const int slot = ThreadSlot();
    EXPECT_NE(slot, kNoThreadSlot);
    EXPECT_EQ(ThreadSlotIfAny(), slot);
  }).join();
}

TEST(ThreadSlotTest, TheNumberOfAThreadThatHasEndedIsGivenAgain) {
  const int slot = SlotOfNewThread();
  for (int i = 0; i < 2 * kThreadSlots; ++i) EXPECT_EQ(SlotOfNewThread(), slot);
}

TEST(ThreadSlotTest, ThreadsThatAreTooManyGetNoneUntilOthersEnd) {
  constexpr int kThreads = kThreadSlots + 8;
  (void)ThreadSlot();  // this thread takes one of the slots
  std::barrier all_asked(kThreads);
  std::vector<int> slots(kThreads);
  RunThreads(kThreads, [&](int thread) {
    slots[thread] = ThreadSlot();
    all_asked.arrive_and_wait();
  });
  std::multiset<int> given(slots.begin(), slots.end());
  EXPECT_EQ(given.count(kNoThreadSlot), 9u);
  given.erase(kNoThreadSlot);
  EXPECT_EQ(std::set<int>(given.begin(), given.end()).size(), given.size());
  EXPECT_FALSE(given.contains(ThreadSlot()));
  EXPECT_LT(SlotOfNewThread(), kThreadSlots);
}

}  // namespace
}  // namespace pinion
