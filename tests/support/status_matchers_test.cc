#include "pinion/tests/support/status_matchers.h"

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/status_says.h"

namespace pinion {
namespace {

using ::pinion::testing::IsExhausted;
using ::pinion::testing::IsInvalid;
using ::pinion::testing::IsOk;
using ::pinion::testing::IsOkAndHolds;
using ::pinion::testing::StatusIs;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(StatusMatchersTest, TellAStatusByItsCodeAndMessage) {
  const absl::Status status = absl::NotFoundError("no such block");
  EXPECT_THAT(absl::OkStatus(), IsOk());
  EXPECT_THAT(status, Not(IsOk()));
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(status, Not(StatusIs(absl::StatusCode::kInternal)));
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kNotFound, HasSubstr("block")));
  EXPECT_THAT(status, Not(StatusIs(absl::StatusCode::kNotFound, HasSubstr("segment"))));
}

TEST(StatusMatchersTest, TellAStatusOrByItsStatusOrValue) {
  const absl::StatusOr<int> value = 7;
  const absl::StatusOr<int> error = absl::NotFoundError("no such block");
  EXPECT_THAT(value, IsOk());
  EXPECT_THAT(value, IsOkAndHolds(7));
  EXPECT_THAT(value, IsOkAndHolds(Gt(6)));
  EXPECT_THAT(value, Not(IsOkAndHolds(8)));
  EXPECT_THAT(error, StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(error, Not(IsOkAndHolds(7)));
}

TEST(StatusMatchersTest, WorkOnMoveOnlyValues) {
  absl::StatusOr<std::unique_ptr<int>> value = std::make_unique<int>(7);
  EXPECT_THAT(value, IsOk());
  PINION_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<int> moved, std::move(value));
  EXPECT_EQ(*moved, 7);
}

TEST(StatusSaysTest, AnErrorIsToldByItsCodeAndAllOfItsTexts) {
  const absl::Status status = absl::ResourceExhaustedError("4 MiB of pinned memory");
  EXPECT_THAT(status, IsExhausted());
  EXPECT_THAT(status, IsExhausted("4 MiB", "pinned"));
  EXPECT_THAT(status, IsExhausted("4 MiB", Not(HasSubstr("pageable"))));
  EXPECT_THAT(status, Not(IsExhausted("4 MiB", "pageable")));
  EXPECT_THAT(status, Not(IsExhausted("4 MiB", Not(HasSubstr("pinned")))));
  EXPECT_THAT(status, Not(IsInvalid()));
}

}  // namespace
}  // namespace pinion
