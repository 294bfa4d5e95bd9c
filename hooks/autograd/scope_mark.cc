#include "pinion/hooks/autograd/scope_mark.h"

#include "pinion/allocator/base/check.h"

namespace pinion {

void ScopeMark::End(const ScopeMark* innermost) {
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
