// Tells whether an object was made in this process or inherited through fork().
//
//   class Pool { ... const ForkOrigin origin_; };       // this process, at construction
//
//   if (origin_.InForkedChild()) return origin_.Refusal("this pool");
//
// A child of fork() has the parent's objects but not its other threads. Locks that those threads
// held stay locked, and tables that they were changing stay half changed. Memory that is hidden
// from children (MADV_DONTFORK) or registered with a device is the parent's alone. So an object
// that has any of these asks here before it locks a mutex or frees memory.
//
// Children of vfork() or a bare clone() are not detected. They should only call exec.
//
// Thread safety: an immutable value. InForkedChild is a single load, fit for a hot path.

#ifndef PINION_ALLOCATOR_BASE_FORK_ORIGIN_H_
#define PINION_ALLOCATOR_BASE_FORK_ORIGIN_H_

#include <atomic>
#include <string_view>

#include "absl/status/status.h"

namespace pinion {

namespace internal {
// Number of fork() calls between this process and the one that loaded the library.
extern std::atomic<int> fork_generation;
}  // namespace internal

class ForkOrigin {
 public:
  ForkOrigin();

  bool InForkedChild() const {
    return internal::fork_generation.load(std::memory_order_relaxed) != generation_;
  }

  // Returns FailedPrecondition: `what` was made before fork(), with the remedy.
  absl::Status Refusal(std::string_view what) const;

 private:
  int generation_;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_FORK_ORIGIN_H_
