// The only test of its process: the first BiasedMutex is made while another thread forks.

#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/biased_mutex.h"
#include "pinion/tests/support/child_process.h"

namespace pinion {
namespace {

using ::pinion::testing::ChildProcess;

// The kernel takes several milliseconds for the first one, in a process with several threads.
TEST(BiasedMutexForkTest, AChildMakesOneWhateverAnotherThreadDidWithTheFirst) {
  std::atomic<bool> forked = false;
  std::thread first([&] {
    const BiasedMutex mu;
    // One that had ended unjoined would be reported in each child by ThreadSanitizer.
    while (!forked) absl::SleepFor(absl::Milliseconds(1));
  });
  std::vector<std::unique_ptr<ChildProcess>> children;
  for (int i = 0; i < 20; ++i) {
    children.push_back(std::make_unique<ChildProcess>([] {
      alarm(10);  // instead of a hang
      BiasedMutex mu;
      const BiasedLock lock(mu, BiasedMutex::By::kOther);
    }));
    absl::SleepFor(absl::Microseconds(300));
  }
  forked = true;
  for (const std::unique_ptr<ChildProcess>& child : children) EXPECT_EQ(child->Wait(), 0);
  first.join();
}

}  // namespace
}  // namespace pinion
