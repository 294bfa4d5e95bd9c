#include "pinion/allocator/allocator_options.h"

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

namespace pinion {
namespace {

using ::pinion::testing::IsInvalid;
using ::pinion::testing::IsOk;

template <typename T>
AllocatorOptions With(T AllocatorOptions::*option, std::type_identity_t<T> value) {
  AllocatorOptions options;
  options.*option = value;
  return options;
}

TEST(AllocatorOptionsTest, TheDefaultsAreValid) {
  EXPECT_THAT(AllocatorOptions().Validate(), IsOk());
}

TEST(AllocatorOptionsTest, AMarkOutOfOrderIsNamedWithItsValue) {
  EXPECT_THAT(With(&AllocatorOptions::warn_percent, 95).Validate(),
              IsInvalid("warn_percent is 95", "high_percent (90)"));
  EXPECT_THAT(With(&AllocatorOptions::low_percent, 91).Validate(), IsInvalid("low_percent is 91"));
}

TEST(AllocatorOptionsTest, AMarkThatIsNoPercentageIsRefused) {
  for (const double percent : {0.0, -1.0, 100.5, std::nan("")}) {
    EXPECT_THAT(With(&AllocatorOptions::high_percent, percent).Validate(),
                IsInvalid("high_percent"))
        << percent;
  }
  EXPECT_THAT(With(&AllocatorOptions::warn_percent, 0).Validate(), IsInvalid());
  EXPECT_THAT(With(&AllocatorOptions::low_percent, 0).Validate(), IsInvalid());
}

TEST(AllocatorOptionsTest, TheEndsOfARangeAreValid) {
  AllocatorOptions options;
  options.high_percent = options.warn_percent = options.low_percent = 100;
  options.segment_bytes = uint64_t{1} << 47;
  options.alignment_bytes = 4096;
  options.max_locked_bytes = 1;
  EXPECT_THAT(options.Validate(), IsOk());
  options.segment_bytes += 1;
  EXPECT_THAT(options.Validate(), IsInvalid("segment_bytes"));
}

TEST(AllocatorOptionsTest, SizesOfZeroAreRefused) {
  EXPECT_THAT(With(&AllocatorOptions::max_locked_bytes, 0).Validate(),
              IsInvalid("max_locked_bytes"));
  EXPECT_THAT(With(&AllocatorOptions::segment_bytes, 0).Validate(), IsInvalid("segment_bytes"));
}

TEST(AllocatorOptionsTest, AnAlignmentIsAPowerOfTwoOfAPageOrMore) {
  for (const uint64_t bytes : {0, 2048, 5000, 12288}) {
    EXPECT_THAT(With(&AllocatorOptions::alignment_bytes, bytes).Validate(),
                IsInvalid("alignment_bytes"))
        << bytes;
  }
}

TEST(AllocatorOptionsTest, ANegativeWaitIsRefused) {
  EXPECT_THAT(With(&AllocatorOptions::max_wait_for_deferred, absl::Milliseconds(-1)).Validate(),
              IsInvalid("max_wait_for_deferred"));
}

}  // namespace
}  // namespace pinion
