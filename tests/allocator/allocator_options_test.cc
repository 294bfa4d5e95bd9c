#include "pinion/allocator/allocator_options.h"

#include <cmath>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(AllocatorOptionsTest, TheDefaultsAreValid) {
  EXPECT_THAT(AllocatorOptions().Validate(), IsOk());
}

TEST(AllocatorOptionsTest, AMarkOutOfOrderIsNamedWithItsValue) {
  AllocatorOptions options;
  options.warn_percent = 95;
  EXPECT_THAT(options.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("warn_percent is 95"), HasSubstr("high_percent (90)"))));
  options = AllocatorOptions();
  options.low_percent = 91;
  EXPECT_THAT(options.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("low_percent is 91")));
}

TEST(AllocatorOptionsTest, AMarkThatIsNoPercentageIsRefused) {
  for (const double percent : {0.0, -1.0, 100.5, std::nan("")}) {
    AllocatorOptions options;
    options.high_percent = percent;
    EXPECT_THAT(options.Validate(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("high_percent")))
        << percent;
  }
}

TEST(AllocatorOptionsTest, TheEndsOfARangeAreValid) {
  AllocatorOptions options;
  options.high_percent = 100;
  options.warn_percent = 100;
  options.low_percent = 100;
  options.segment_bytes = uint64_t{1} << 47;
  options.alignment_bytes = 4096;
  options.max_locked_bytes = 1;
  EXPECT_THAT(options.Validate(), IsOk());
  options.segment_bytes += 1;
  EXPECT_THAT(options.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("segment_bytes")));
  for (double AllocatorOptions::*mark :
       {&AllocatorOptions::high_percent, &AllocatorOptions::warn_percent,
        &AllocatorOptions::low_percent}) {
    AllocatorOptions zero;
    zero.*mark = 0;
    EXPECT_THAT(zero.Validate(), StatusIs(absl::StatusCode::kInvalidArgument));
  }
}

TEST(AllocatorOptionsTest, SizesOfZeroAreRefused) {
  AllocatorOptions options;
  options.max_locked_bytes = 0;
  EXPECT_THAT(options.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_locked_bytes")));
  options = AllocatorOptions();
  options.segment_bytes = 0;
  EXPECT_THAT(options.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("segment_bytes")));
}

TEST(AllocatorOptionsTest, AnAlignmentIsAPowerOfTwoOfAPageOrMore) {
  for (const uint64_t bytes : {0, 2048, 5000, 12288}) {
    AllocatorOptions options;
    options.alignment_bytes = bytes;
    EXPECT_THAT(options.Validate(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("alignment_bytes")))
        << bytes;
  }
}

TEST(AllocatorOptionsTest, ANegativeWaitIsRefused) {
  AllocatorOptions options;
  options.max_wait_for_deferred = absl::Milliseconds(-1);
  EXPECT_THAT(options.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_wait_for_deferred")));
}

}  // namespace
}  // namespace pinion
