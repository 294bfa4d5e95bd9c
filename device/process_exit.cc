#include "pinion/device/process_exit.h"

namespace pinion {
namespace internal {

// Trivially destructible: readable after every other static is destroyed.
constinit std::atomic<bool> process_is_exiting{false};

}  // namespace internal

void WatchProcess() {
  // Not std::atexit: under ThreadSanitizer its handlers outlive the library that registered them.
  struct Exit {
    ~Exit() { internal::process_is_exiting.store(true, std::memory_order_relaxed); }
  };
  static const Exit exit;
}

}  // namespace pinion
