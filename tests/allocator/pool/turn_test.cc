#include <atomic>
#include <barrier>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "pinion/allocator/pool/grower.h"

namespace pinion::internal {
namespace {

// The sleep gives a broken turn the chance to let the other thread in.
void ExpectThatOthersWaitForTheOuter(bool take_again) {
  Turn turn;
  std::atomic<bool> outer_ended = false;
  std::atomic<bool> other_comes = false;
  std::thread other;
  {
    const TurnHolder outer(turn);
    if (take_again) const TurnHolder inner(turn);
    other = std::thread([&] {
      other_comes = true;
      const TurnHolder mine(turn);
      EXPECT_TRUE(outer_ended);
    });
    while (!other_comes) std::this_thread::yield();
    absl::SleepFor(absl::Milliseconds(20));
    outer_ended = true;
  }
  other.join();
}

TEST(TurnTest, OthersWaitUntilTheTurnEnds) { ExpectThatOthersWaitForTheOuter(false); }

// As with two allocators whose callbacks call each other.
TEST(TurnTest, WhoHasATurnWaitsForNoSecondOneAndLeavesThatToWhoHasIt) {
  Turn mine;
  Turn others;
  std::barrier both(2);
  std::atomic<bool> others_ended = false;
  std::thread other([&] {
    const TurnHolder outer(others);
    both.arrive_and_wait();  // each thread has its turn
    both.arrive_and_wait();  // the nested turn is over
    absl::SleepFor(absl::Milliseconds(20));
    others_ended = true;
  });
  {
    const TurnHolder outer(mine);
    both.arrive_and_wait();
    { const TurnHolder second(others); }
    both.arrive_and_wait();
  }
  const TurnHolder waits(others);
  EXPECT_TRUE(others_ended);
  other.join();
}

TEST(TurnTest, ASecondTurnThatIsFreeIsTaken) {
  Turn first;
  const TurnHolder mine(first);
  ExpectThatOthersWaitForTheOuter(false);
}

TEST(TurnTest, TheEndOfAnInnerTurnDoesNotEndTheOuter) { ExpectThatOthersWaitForTheOuter(true); }

}  // namespace
}  // namespace pinion::internal
