// Rejects a function that cannot be called: an empty std::function, a null function pointer, an
// empty module holder, or a std::ref to one of these.
//
//   CheckCallable(segment, "the segment of checkpoint()");
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_CHECKPOINT_CALLABLE_H_
#define PINION_HOOKS_CHECKPOINT_CALLABLE_H_

#include <c10/util/Exception.h>

#include <functional>
#include <type_traits>

namespace pinion::checkpoint_internal {

template <typename Function>
bool IsCallable(const Function& function) {
  if constexpr (std::is_constructible_v<bool, const Function&>) {
    return static_cast<bool>(function);
  } else {
    return true;
  }
}
template <typename Function>
bool IsCallable(const std::reference_wrapper<Function>& function) {
  return IsCallable(function.get());
}

// Throws c10::Error with a text that begins with `name` if `function` is empty.
template <typename Function>
void CheckCallable(const Function& function, const char* name) {
  TORCH_CHECK(IsCallable(function), name, " is empty: give a function or a module to call");
}

}  // namespace pinion::checkpoint_internal

#endif  // PINION_HOOKS_CHECKPOINT_CALLABLE_H_
