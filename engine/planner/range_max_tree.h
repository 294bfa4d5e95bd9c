// An array of numbers with range addition and range maximum.
//
//   RangeMaxTree tree(4);
//   tree.Add(1, 2, 10);                 // places 1 and 2
//   tree.MostIn(0, 3);                  // 10
//   tree.LastAbove(3, 9);               // 2: the last place up to 3 with more than 9
//   tree.FirstAbove(1, 9);              // 1: the first place from 1 on
//
// A segment tree: every call takes logarithmic time.

#ifndef PINION_ENGINE_PLANNER_RANGE_MAX_TREE_H_
#define PINION_ENGINE_PLANNER_RANGE_MAX_TREE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace pinion {

class RangeMaxTree {
 public:
  explicit RangeMaxTree(size_t places) : RangeMaxTree(std::vector<int64_t>(places)) {}
  // `amounts` are the initial values.
  explicit RangeMaxTree(const std::vector<int64_t>& amounts) {
    while (leaves_ < amounts.size()) leaves_ *= 2;
    most_.resize(2 * leaves_);
    added_.resize(2 * leaves_);
    std::copy(amounts.begin(), amounts.end(), most_.begin() + static_cast<int64_t>(leaves_));
    for (size_t node = leaves_; --node > 0;) {
      most_[node] = std::max(most_[2 * node], most_[2 * node + 1]);
    }
  }

  // Adds to the places from `first` to `last`. Adds nothing if `first` is above `last`.
  void Add(size_t first, size_t last, int64_t amount) {
    if (first <= last) AddBelow(1, 0, leaves_ - 1, {first, last}, amount);
  }
  int64_t MostIn(size_t first, size_t last) const {
    return first <= last ? MostBelow(1, 0, leaves_ - 1, {first, last}) : INT64_MIN;
  }
  std::optional<size_t> LastAbove(size_t last, int64_t limit) const {
    return LastBelow(1, 0, leaves_ - 1, last, limit);
  }
  std::optional<size_t> FirstAbove(size_t first, int64_t limit) const {
    return FirstBelow(1, 0, leaves_ - 1, first, limit);
  }

 private:
  struct Range {
    size_t first;
    size_t last;
  };

  void AddBelow(size_t node, size_t begin, size_t end, const Range& range, int64_t amount) {
    if (range.last < begin || end < range.first) return;
    if (range.first <= begin && end <= range.last) {
      most_[node] += amount;
      added_[node] += amount;
      return;
    }
    const size_t middle = (begin + end) / 2;
    AddBelow(2 * node, begin, middle, range, amount);
    AddBelow(2 * node + 1, middle + 1, end, range, amount);
    most_[node] = added_[node] + std::max(most_[2 * node], most_[2 * node + 1]);
  }

  int64_t MostBelow(size_t node, size_t begin, size_t end, const Range& range) const {
    if (range.last < begin || end < range.first) return INT64_MIN;
    if (range.first <= begin && end <= range.last) return most_[node];
    const size_t middle = (begin + end) / 2;
    const int64_t most = std::max(MostBelow(2 * node, begin, middle, range),
                                  MostBelow(2 * node + 1, middle + 1, end, range));
    return most + added_[node];  // one of the halves lies in the range
  }

  std::optional<size_t> LastBelow(size_t node, size_t begin, size_t end, size_t last,
                                  int64_t limit) const {
    if (last < begin || most_[node] <= limit) return std::nullopt;
    if (begin == end) return begin;
    const size_t middle = (begin + end) / 2;
    const int64_t below = limit - added_[node];
    const std::optional<size_t> right = LastBelow(2 * node + 1, middle + 1, end, last, below);
    return right.has_value() ? right : LastBelow(2 * node, begin, middle, last, below);
  }

  std::optional<size_t> FirstBelow(size_t node, size_t begin, size_t end, size_t first,
                                   int64_t limit) const {
    if (end < first || most_[node] <= limit) return std::nullopt;
    if (begin == end) return begin;
    const size_t middle = (begin + end) / 2;
    const int64_t below = limit - added_[node];
    const std::optional<size_t> left = FirstBelow(2 * node, begin, middle, first, below);
    return left.has_value() ? left : FirstBelow(2 * node + 1, middle + 1, end, first, below);
  }

  size_t leaves_ = 1;
  std::vector<int64_t> most_;   // below a node, what was added above it left out
  std::vector<int64_t> added_;  // to all of a node
};

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_RANGE_MAX_TREE_H_
