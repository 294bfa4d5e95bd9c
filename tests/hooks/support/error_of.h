// Returns the messages of LibTorch's errors.
//
//   EXPECT_THAT(ErrorOf([&] { Target::Of(at::ones({2})); }), HasSubstr("one integer"));

#ifndef PINION_TESTS_HOOKS_SUPPORT_ERROR_OF_H_
#define PINION_TESTS_HOOKS_SUPPORT_ERROR_OF_H_

#include <c10/util/Exception.h>

#include <string>

namespace pinion::testing {

// The message of the c10::Error that `function` throws; "no error" if it returns.
template <typename Function>
std::string ErrorOf(const Function& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_SUPPORT_ERROR_OF_H_
