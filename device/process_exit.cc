#include "pinion/device/process_exit.h"

#include <pthread.h>

#include <atomic>
#include <cstdlib>

namespace pinion {
namespace {

// Trivially destructible: they can be read after every other static is gone.
std::atomic<bool> exiting{false};
std::atomic<int> fork_generation{0};

bool RegisterHandlers() {
  return std::atexit([] { exiting.store(true, std::memory_order_relaxed); }) == 0 &&
         pthread_atfork(nullptr, nullptr,
                        [] { fork_generation.fetch_add(1, std::memory_order_relaxed); }) == 0;
}

}  // namespace

void WatchProcess() {
  static const bool registered = RegisterHandlers();
  static_cast<void>(registered);
}

bool ProcessIsExiting() { return exiting.load(std::memory_order_relaxed); }

int ForkGeneration() { return fork_generation.load(std::memory_order_relaxed); }

}  // namespace pinion
