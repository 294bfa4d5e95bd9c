// Makes the process's first BiasedMutex while another thread forks. Has a process of its own,
// because only the first one sets the barrier up.

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

// In a process with several threads the kernel takes milliseconds to set the first barrier up.
TEST(BiasedMutexForkTest, AChildMakesOneWhateverAnotherThreadDidWithTheFirst) {
  std::atomic<bool> forked = false;
  std::thread first([&] {
    const BiasedMutex mu;
    // Lives until the last fork: ThreadSanitizer reports an ended, unjoined thread in each child.
    while (!forked) absl::SleepFor(absl::Milliseconds(1));
  });
  std::vector<std::unique_ptr<ChildProcess>> children;
  for (int i = 0; i < 20; ++i) {
    children.push_back(std::make_unique<ChildProcess>([] {
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
