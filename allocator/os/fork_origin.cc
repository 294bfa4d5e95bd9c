#include "pinion/allocator/os/fork_origin.h"

#include <pthread.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace pinion {
namespace internal {

// Trivially destructible: it can be read after every other static is gone.
std::atomic<int> fork_generation{0};

}  // namespace internal
namespace {

struct Kept {
  std::shared_ptr<const void> object;
  Kept* next;
};

// Reachable, so that a leak checker in the child has nothing to say.
std::atomic<Kept*> first_kept{nullptr};

}  // namespace

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

void KeepForEver(std::shared_ptr<const void> inherited) {
  Kept* const kept = new Kept{std::move(inherited), first_kept.load()};
  while (!first_kept.compare_exchange_weak(kept->next, kept)) {
  }
}

}  // namespace pinion
