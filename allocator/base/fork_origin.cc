#include "pinion/allocator/base/fork_origin.h"

#include <pthread.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace pinion {
namespace internal {

// Trivially destructible, so that it can be read after all other statics are destroyed.
std::atomic<int> fork_generation{0};

}  // namespace internal

namespace {

// Not a static inside a function, whose lock a child could find taken.
[[maybe_unused]] const int counted_in_child = pthread_atfork(
    nullptr, nullptr, [] { internal::fork_generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

ForkOrigin::ForkOrigin() : generation_(internal::fork_generation.load(std::memory_order_relaxed)) {}

absl::Status ForkOrigin::Refusal(std::string_view what) const {
  return absl::FailedPreconditionError(absl::StrCat(
      std::string(what),
      " was made before fork() and cannot be used in the child process: make another one in the "
      "child, or start processes that do not inherit it (Python: the start method 'spawn')"));
}

}  // namespace pinion
