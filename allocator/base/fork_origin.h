// Whether an object came into this process by fork() instead of being made in it.
//
//   class Pool { ... const ForkOrigin origin_; };       // this process, at construction
//
//   if (origin_.InForkedChild()) return origin_.Refusal("this pool");
//
// A child of fork() has the parent's objects and none of its other threads: a lock that one of
// them held stays taken, a table that it was changing stays half changed, and memory that is kept
// from children (MADV_DONTFORK) or registered with a device is the parent's alone. So an object
// that holds any of that asks here before it takes a lock or frees memory.
//
// A process made by vfork() or a bare clone() is not told apart: it is there to call exec.
//
// Thread safety: a value that does not change. InForkedChild is one load: fit for a hot path.

#ifndef PINION_ALLOCATOR_BASE_FORK_ORIGIN_H_
#define PINION_ALLOCATOR_BASE_FORK_ORIGIN_H_

#include <atomic>
#include <string_view>

#include "absl/status/status.h"

namespace pinion {

namespace internal {
// fork() calls that lie between this process and the one that loaded the library.
extern std::atomic<int> fork_generation;
}  // namespace internal

class ForkOrigin {
 public:
  ForkOrigin();

  bool InForkedChild() const {
    return internal::fork_generation.load(std::memory_order_relaxed) != generation_;
  }

  // FailedPrecondition: `what` was made before fork(), and what to do instead.
  absl::Status Refusal(std::string_view what) const;

 private:
  int generation_;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_FORK_ORIGIN_H_
