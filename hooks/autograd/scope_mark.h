// Scopes of a thread end in the reverse of the order in which they began, and on that thread. A
// program that keeps them on the heap can break that rule. A ScopeMark finds out, says so in the
// log by the scope's name, and lets the thread drop a scope that has ended elsewhere.
//
//   struct Listening {
//     ScopeMark mark{"TapScope"};
//     TapListener* listener;
//     std::shared_ptr<Listening> outer;               // the scope around this one
//   };
//   thread_local std::shared_ptr<Listening> innermost;
//
// A scope shares its mark with the thread's state. Its destructor calls End(), and whoever asks for
// the innermost scope passes by those with HasEnded().
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_AUTOGRAD_SCOPE_MARK_H_
#define PINION_HOOKS_AUTOGRAD_SCOPE_MARK_H_

#include <atomic>
#include <thread>

namespace pinion {

class ScopeMark {
 public:
  // Of a scope of the calling thread. `name` is for the log, and outlives the mark.
  explicit ScopeMark(const char* name) : name_(name) {}

  // The scope ends. `innermost` is the mark of the calling thread's innermost scope, null without
  // one. Logs an error if that is not this mark.
  void End(const ScopeMark* innermost);

  // Whether the scope has ended, on any thread. False on a thread that LibTorch has carried the
  // scope to: what that thread still does belongs to the scope.
  bool HasEnded() const {
    return has_ended_.load(std::memory_order_acquire) && thread_ == std::this_thread::get_id();
  }

 private:
  const char* const name_;
  const std::thread::id thread_ = std::this_thread::get_id();
  std::atomic<bool> has_ended_ = false;
};

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_SCOPE_MARK_H_
