// Matchers for an error by its code and the texts in its message. Each works on absl::Status and
// absl::StatusOr.
//
//   EXPECT_THAT(allocator->Allocate(kGiB), IsExhausted("max_locked_bytes", "64 MiB"));
//   EXPECT_THAT(allocator->Allocate(kGiB), IsExhausted("64 MiB", Not(HasSubstr("pinned"))));
//   EXPECT_THAT(allocator->Allocate(0), IsInvalid());

#ifndef PINION_TESTS_SUPPORT_STATUS_SAYS_H_
#define PINION_TESTS_SUPPORT_STATUS_SAYS_H_

#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {

namespace internal {

template <typename Part>
auto MatcherOf(const Part& part) {
  if constexpr (std::is_convertible_v<Part, std::string>) {
    return ::testing::HasSubstr(std::string(part));
  } else {
    return part;
  }
}

}  // namespace internal

// Each of `parts` is a text that the message contains, or a matcher of the message.
template <typename... Parts>
auto StatusSays(absl::StatusCode code, const Parts&... parts) {
  return StatusIs(code,
                  ::testing::AllOf(::testing::A<std::string>(), internal::MatcherOf(parts)...));
}

template <typename... Parts>
auto IsExhausted(const Parts&... parts) {
  return StatusSays(absl::StatusCode::kResourceExhausted, parts...);
}

template <typename... Parts>
auto IsInvalid(const Parts&... parts) {
  return StatusSays(absl::StatusCode::kInvalidArgument, parts...);
}

template <typename... Parts>
auto IsInternalError(const Parts&... parts) {
  return StatusSays(absl::StatusCode::kInternal, parts...);
}

template <typename... Parts>
auto IsUnavailable(const Parts&... parts) {
  return StatusSays(absl::StatusCode::kUnavailable, parts...);
}

template <typename... Parts>
auto IsFailedPrecondition(const Parts&... parts) {
  return StatusSays(absl::StatusCode::kFailedPrecondition, parts...);
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_STATUS_SAYS_H_
