#include "pinion/bench/allocator/allocation_trace.h"

#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::HasSubstr;

TEST(AllocationTraceTest, TextBecomesEventsAndTotals) {
  const auto trace = ParseAllocationTrace("net",
                                          "# a comment\ns\na 0 100\na 1 50\nf 0\na 0 30\n"
                                          "f 1\nf 0\n");
  ASSERT_THAT(trace, IsOk());
  EXPECT_EQ(trace->name, "net");
  EXPECT_EQ(trace->events.size(), 6u);
  EXPECT_EQ(trace->allocations, 3u);
  EXPECT_EQ(trace->blocks, 2u);
  EXPECT_EQ(trace->peak_bytes, 150u);
}

TEST(AllocationTraceTest, AWrongLineIsNamed) {
  const auto is_refused = [](const char* text, const char* why) {
    EXPECT_THAT(ParseAllocationTrace("net", text),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)))
        << text;
  };
  is_refused("a 0 5\na 0 6\n", "line 2: allocated twice");
  is_refused("f 3\n", "line 1: freed, but not allocated");
  is_refused("a 0 0\n", "line 1: no size");
  is_refused("a\n", "a block's number is missing");
  is_refused("x 1\n", "neither s, a nor f");
  is_refused("s\na 7 10\n", "block 7 is never freed");
}

TEST(AllocationTraceTest, AMissingFileIsNamed) {
  EXPECT_THAT(ReadAllocationTrace("no/such.txt"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no/such.txt")));
}

TEST(AllocationTraceTest, TheRecordedTracesAreWholeStepsOfMixedSizes) {
  for (const std::string name : {"convnet", "gpt2_small", "lstm_512"}) {
    SCOPED_TRACE(name);
    const auto trace = ReadAllocationTrace("bench/allocator/traces/" + name + ".txt");
    ASSERT_THAT(trace, IsOk());
    EXPECT_EQ(trace->name, name);
    EXPECT_GT(trace->allocations, 100u);
  }
}

}  // namespace
}  // namespace pinion
