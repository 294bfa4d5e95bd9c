#include "pinion/device/process_exit.h"

#include <atomic>
#include <cstdlib>

namespace pinion {
namespace {

// Trivially destructible: it can be read after every other static is gone.
std::atomic<bool> exiting{false};

}  // namespace

void WatchProcess() {
  static const int registered = std::atexit([] { exiting.store(true, std::memory_order_relaxed); });
  static_cast<void>(registered);
}

bool ProcessIsExiting() { return exiting.load(std::memory_order_relaxed); }

}  // namespace pinion
