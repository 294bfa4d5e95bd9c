#include "pinion/allocator/base/fork_origin.h"

#include <pthread.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace pinion {
namespace internal {

// Trivially destructible: it can be read after every other static is gone.
std::atomic<int> fork_generation{0};

}  // namespace internal

namespace {

// While the library is loaded: a static of a function has a lock, which a child would find taken if
// another thread was just making the first ForkOrigin.
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
