#include "pinion/allocator/base/wait_for_look.h"

#include <chrono>
#include <thread>

namespace pinion {
namespace {

constexpr int kAtOnce = 100;
constexpr int kYields = 100;
constexpr std::chrono::microseconds kSleep(50);

}  // namespace

void WaitForLook(int looks) {
  if (looks >= kAtOnce + kYields) {
    std::this_thread::sleep_for(kSleep);
  } else if (looks >= kAtOnce) {
    std::this_thread::yield();
  }
}

}  // namespace pinion
