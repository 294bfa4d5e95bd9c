#include "pinion/device/process_exit.h"

#include <atomic>

namespace pinion {
namespace {

// Trivially destructible: it can be read after every other static is gone.
std::atomic<bool> exiting{false};

}  // namespace

void WatchProcess() {
  // Not std::atexit: under ThreadSanitizer its handlers outlive the library that registered them.
  struct Exit {
    ~Exit() { exiting.store(true, std::memory_order_relaxed); }
  };
  static const Exit exit;
}

bool ProcessIsExiting() { return exiting.load(std::memory_order_relaxed); }

}  // namespace pinion
