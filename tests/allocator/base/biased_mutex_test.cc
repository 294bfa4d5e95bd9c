#include "pinion/allocator/base/biased_mutex.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "pinion/config/build_config.h"
#include "pinion/tests/support/forbid_barriers.h"
#include "pinion/tests/support/run_threads.h"

namespace pinion {
namespace {

using ::pinion::testing::ForbidBarriers;
using ::pinion::testing::MayForbidBarriers;
using ::pinion::testing::RunThreads;
using Barrier = BiasedMutex::Barrier;
using By = BiasedMutex::By;

// Runs with the host's best barrier and without one, as on hosts that have none.
class BiasedMutexTest : public ::testing::TestWithParam<bool> {
 protected:
  BiasedMutexTest() : mu_(GetParam() ? BiasedMutex::BestBarrier() : Barrier::kNone) {}

  // Another thread enters `times` times as `waits`.
  void ExpectWaits(By inside, By waits, int times = 1) {
    std::atomic<bool> taken = false;
    std::thread other;
    {
      const BiasedLock lock(mu_, inside);
      other = std::thread([&] {
        for (int i = 0; i < times; ++i) {
          const BiasedLock lock(mu_, waits);
          taken = true;
        }
      });
      absl::SleepFor(absl::Milliseconds(50));
      EXPECT_FALSE(taken);
    }
    other.join();
    EXPECT_TRUE(taken);
  }

  BiasedMutex mu_;
};

INSTANTIATE_TEST_SUITE_P(AllBarriers, BiasedMutexTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "OfThisHost" : "None"; });

TEST_P(BiasedMutexTest, OwnerAndOthersExcludeEachOther) {
  constexpr uint64_t kOfOwner = 1'000'000;
  constexpr uint64_t kOfOther = 20'000;
  uint64_t count = 0;
  std::atomic<int> others = 2;
  std::vector<std::thread> threads;
  for (const By by : {By::kOther, By::kAnnounced}) {
    threads.emplace_back([&, by] {
      for (uint64_t n = 0; n < kOfOther; ++n) {
        // One announcement covers four locked sections.
        if (by == By::kAnnounced && n % 4 == 0) {
          mu_.Announce();
          BiasedMutex::RunBarrier();
        }
        const absl::Cleanup renounce = [&] {
          if (by == By::kAnnounced && n % 4 == 3) mu_.Renounce();
        };
        const BiasedLock lock(mu_, by);
        // The slow increment makes an owner that enters meanwhile lose a count.
        const uint64_t before = count;
        for (int spins = 0; spins < 300; ++spins) asm volatile("" ::: "memory");
        count = before + 1;
      }
      --others;
    });
  }
  uint64_t of_owner = 0;
  while (of_owner < kOfOwner || others > 0) {
    const BiasedLock lock(mu_, By::kOwner);
    ++count;
    ++of_owner;
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(count, of_owner + 2 * kOfOther);
}

TEST_P(BiasedMutexTest, AnotherThreadWaitsForTheOwnerThatIsInside) {
  ExpectWaits(By::kOwner, By::kOther);
  std::thread([&] { const BiasedLock lock(mu_, By::kOther); }).join();
  ExpectWaits(By::kOwner, By::kOther);
}

TEST_P(BiasedMutexTest, AnAnnouncementKeepsNobodyOut) {
  mu_.Announce();
  BiasedMutex::RunBarrier();
  std::thread([&] { const BiasedLock lock(mu_, By::kOwner); }).join();
  std::thread([&] { const BiasedLock lock(mu_, By::kOther); }).join();
  { const BiasedLock lock(mu_, By::kAnnounced); }
  mu_.Renounce();
}

TEST_P(BiasedMutexTest, TheOwnerWaitsForAnotherThreadThatIsInside) {
  ExpectWaits(By::kOther, By::kOwner, /*times=*/3);
}

TEST(BiasedMutexDeathTest, TheOwnerDoesNotEnterTwice) {
  if (!config::kHardened) GTEST_SKIP() << "checked in hardened builds";
  BiasedMutex mu;
  const BiasedLock lock(mu, By::kOwner);
  EXPECT_DEATH(mu.Lock(By::kOwner), "inside already");
}

TEST(BiasedMutexBarrierTest, TheKernelsIsUsedWhereItHasOne) {
  const int64_t commands = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
  const bool has_one = commands > 0 && (commands & MEMBARRIER_CMD_PRIVATE_EXPEDITED) != 0;
  EXPECT_EQ(BiasedMutex::BestBarrier(), has_one ? Barrier::kOfTheKernel : Barrier::kNone);
}

// The child has not asked the kernel for a barrier yet.
TEST(BiasedMutexDeathTest, WhereBarriersAreForbiddenNoneIsUsed) {
  if (!MayForbidBarriers()) GTEST_SKIP() << "no seccomp(2)";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        ForbidBarriers();
        const bool none = BiasedMutex::BestBarrier() == Barrier::kNone;
        BiasedMutex mu;
        { const BiasedLock lock(mu, By::kOther); }
        std::exit(none ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

// Without the barrier another thread would enter while the owner is inside.
TEST(BiasedMutexDeathTest, ABarrierThatIsForbiddenLaterEndsTheProgramWithARemedy) {
  BiasedMutex mu;
  if (BiasedMutex::BestBarrier() == Barrier::kNone || !MayForbidBarriers()) {
    GTEST_SKIP() << "no membarrier(2), or no seccomp(2)";
  }
  EXPECT_DEATH(
      {
        ForbidBarriers();
        const BiasedLock lock(mu, By::kOther);
      },
      "fails with errno 1.*let the seccomp filter pass it");
}

TEST(BiasedMutexWithoutOwnerTest, ThreadsExcludeEachOther) {
  constexpr uint64_t kEach = 100'000;
  BiasedMutex mu(Barrier::kNone);
  uint64_t count = 0;
  RunThreads(3, [&](int) {
    for (uint64_t n = 0; n < kEach; ++n) {
      const BiasedLock lock(mu, By::kOther);
      ++count;
    }
  });
  EXPECT_EQ(count, 3 * kEach);
}

}  // namespace
}  // namespace pinion
