#include "pinion/allocator/os/fork_origin.h"

#include <pthread.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace pinion {
namespace internal {

// Trivially destructible: it can be read after every other static is gone.
std::atomic<int> fork_generation{0};

}  // namespace internal

ForkOrigin::ForkOrigin() {
  static const int registered = pthread_atfork(
      nullptr, nullptr, [] { internal::fork_generation.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  generation_ = internal::fork_generation.load(std::memory_order_relaxed);
}

absl::Status ForkOrigin::Refusal(std::string_view what) const {
  return absl::FailedPreconditionError(absl::StrCat(
      std::string(what),
      " was made before fork() and cannot be used in the child process: make another one in the "
      "child, or start processes that do not inherit it (Python: the start method 'spawn')"));
}

}  // namespace pinion
