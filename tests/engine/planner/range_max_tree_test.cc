#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/engine/planner/residency_planner.h"

namespace pinion {
namespace {

// Reference implementation on a plain vector.
std::optional<size_t> LastAbove(const std::vector<int64_t>& row, size_t last, int64_t limit) {
  for (size_t i = last + 1; i-- > 0;) {
    if (row[i] > limit) return i;
  }
  return std::nullopt;
}

std::optional<size_t> FirstAbove(const std::vector<int64_t>& row, size_t first, int64_t limit) {
  for (size_t i = first; i < row.size(); ++i) {
    if (row[i] > limit) return i;
  }
  return std::nullopt;
}

TEST(RangeMaxTree, SaysWhatAPlainRowSays) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&random](size_t end) { return random() % end; };
    const size_t places = 1 + below(40);
    std::vector<int64_t> row(places);
    RangeMaxTree room(places);
    for (int step = 0; step < 200; ++step) {
      const size_t first = below(places);
      const size_t last = first + below(places - first);
      const int64_t amount = static_cast<int64_t>(below(21)) - 10;
      room.Add(first, last, amount);
      for (size_t i = first; i <= last; ++i) row[i] += amount;
      const size_t from = below(places);
      const size_t to = from + below(places - from);
      ASSERT_EQ(room.MostIn(from, to),
                *std::max_element(row.begin() + static_cast<int64_t>(from),
                                  row.begin() + static_cast<int64_t>(to) + 1));
      const int64_t limit = static_cast<int64_t>(below(61)) - 30;
      ASSERT_EQ(room.LastAbove(to, limit), LastAbove(row, to, limit)) << to << " " << limit;
      const std::optional<size_t> above = FirstAbove(row, from, limit);
      // Past the row, where 0 may exceed the limit, the result is unspecified.
      if (above.has_value() || limit >= 0) {
        ASSERT_EQ(room.FirstAbove(from, limit), above) << from << " " << limit;
      }
    }
  }
}

TEST(RangeMaxTree, ARangeThatEndsBeforeItBeginsIsEmpty) {
  RangeMaxTree room(3);
  room.Add(2, 1, 5);
  EXPECT_EQ(room.MostIn(0, 2), 0);
  EXPECT_EQ(room.MostIn(2, 1), INT64_MIN);
}

}  // namespace
}  // namespace pinion
