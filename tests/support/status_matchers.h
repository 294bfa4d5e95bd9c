// GoogleTest matchers for absl::Status and absl::StatusOr. Each works on both.
//
//   EXPECT_THAT(allocator->Reserve(kMiB), IsOk());
//   EXPECT_THAT(allocator->Allocate(0), StatusIs(absl::StatusCode::kInvalidArgument));
//   EXPECT_THAT(allocator->Allocate(0), StatusIs(absl::StatusCode::kInvalidArgument,
//                                                HasSubstr("size_bytes")));
//   EXPECT_THAT(allocator->Trim(0), IsOkAndHolds(64 * kMiB));
//   EXPECT_THAT(allocator->Trim(0), IsOkAndHolds(Gt(0u)));
//
// Abseil's own matchers are missing in Debian's older Abseil.

#ifndef PINION_TESTS_SUPPORT_STATUS_MATCHERS_H_
#define PINION_TESTS_SUPPORT_STATUS_MATCHERS_H_

#include <ostream>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"

namespace pinion {
namespace testing {
namespace internal {

inline const absl::Status& GetStatus(const absl::Status& status) { return status; }

template <typename T>
const absl::Status& GetStatus(const absl::StatusOr<T>& status_or) {
  return status_or.status();
}

}  // namespace internal

MATCHER(IsOk, negation ? "is not OK" : "is OK") {
  const absl::Status& status = internal::GetStatus(arg);
  if (!status.ok()) *result_listener << status;
  return status.ok();
}

MATCHER_P(StatusIs, code, "has the status code " + absl::StatusCodeToString(code)) {
  const absl::Status& status = internal::GetStatus(arg);
  *result_listener << status;
  return status.code() == code;
}

MATCHER_P2(StatusIs, code, message_matcher,
           "has the status code " + absl::StatusCodeToString(code) + " and a message that " +
               ::testing::DescribeMatcher<std::string>(message_matcher)) {
  const absl::Status& status = internal::GetStatus(arg);
  *result_listener << status;
  return status.code() == code &&
         ::testing::Matches(message_matcher)(std::string(status.message()));
}

// `value_matcher` may also be a plain value.
MATCHER_P(IsOkAndHolds, value_matcher, "is OK and holds a value that matches") {
  if (!arg.ok()) {
    *result_listener << arg.status();
    return false;
  }
  return ::testing::ExplainMatchResult(value_matcher, *arg, result_listener);
}

}  // namespace testing
}  // namespace pinion

// Asserts that `expression` is OK and assigns its value to `lhs`.
#define PINION_ASSERT_OK_AND_ASSIGN(lhs, expression) \
  PINION_ASSERT_OK_AND_ASSIGN_IMPL(PINION_TEST_CONCAT(pinion_status_or_, __LINE__), lhs, expression)

#define PINION_ASSERT_OK_AND_ASSIGN_IMPL(result, lhs, expression) \
  auto result = (expression);                                     \
  ASSERT_TRUE(result.ok()) << result.status();                    \
  lhs = *std::move(result)

#define PINION_TEST_CONCAT(a, b) PINION_TEST_CONCAT_IMPL(a, b)
#define PINION_TEST_CONCAT_IMPL(a, b) a##b

#endif  // PINION_TESTS_SUPPORT_STATUS_MATCHERS_H_
