#include "pinion/allocator/pool/turn.h"

#include <atomic>
#include <barrier>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace pinion::internal {
namespace {

// The other thread is given time to come in too early; a correct turn cannot let it.
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

// Two threads in turns of two allocators whose callbacks come to the other one.
TEST(TurnTest, WhoHasATurnWaitsForNoSecondOneAndLeavesThatToWhoHasIt) {
  Turn mine;
  Turn others;
  std::barrier both(2);
  std::atomic<bool> others_ended = false;
  std::thread other([&] {
    const TurnHolder outer(others);
    both.arrive_and_wait();  // each has one
    both.arrive_and_wait();  // the second one has come and gone
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
