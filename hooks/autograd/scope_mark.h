// Detects a scope object that ends out of order or on another thread, logs the error by the scope's
// name, and lets the thread remove the scope later.
//
//   struct Listening {
//     ScopeMark mark{"TapScope"};
//     TapListener* listener;
//     std::shared_ptr<Listening> outer;               // the enclosing scope
//   };
//   thread_local std::shared_ptr<Listening> innermost;
//
// A scope shares its mark with the thread's state. The scope's destructor calls End(); code that
// looks for the innermost scope skips those with HasEnded().
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_AUTOGRAD_SCOPE_MARK_H_
#define PINION_HOOKS_AUTOGRAD_SCOPE_MARK_H_

#include <atomic>
#include <thread>

#include "pinion/allocator/base/check.h"

namespace pinion {

class ScopeMark {
 public:
  // Marks a scope of the calling thread. `name` is for the log and must outlive the mark.
  explicit ScopeMark(const char* name) : name_(name) {}

  // Ends the scope. `innermost` is the mark of the calling thread's innermost scope, or null. Logs
  // an error if that is another mark.
  void End(const ScopeMark* innermost);

  // Returns whether the scope has ended, on any thread. Always false on threads that LibTorch has
  // carried the scope to: their work still belongs to the scope.
  bool HasEnded() const {
    return has_ended_.load(std::memory_order_acquire) && thread_ == std::this_thread::get_id();
  }

 private:
  const char* const name_;
  const std::thread::id thread_ = std::this_thread::get_id();
  std::atomic<bool> has_ended_ = false;
};

inline void ScopeMark::End(const ScopeMark* innermost) {
  if (thread_ != std::this_thread::get_id()) {
    PINION_LOG(kError) << name_
                       << " has ended on another thread than the one that opened it, where it has "
                          "no effect from now on: end scopes on the thread that opens them";
  } else if (innermost != this) {
    PINION_LOG(kError) << name_ << " has ended out of order, where the innermost scope is "
                       << (innermost == nullptr ? "none of this kind" : innermost->name_)
                       << ": end scopes in the reverse of the order in which they are opened";
  }
  has_ended_.store(true, std::memory_order_release);
}

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_SCOPE_MARK_H_
