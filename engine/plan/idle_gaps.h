// Whom a plan sends away where a stretch needs room. Part of step_plan.cc.

#ifndef PINION_ENGINE_PLAN_IDLE_GAPS_H_
#define PINION_ENGINE_PLAN_IDLE_GAPS_H_

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "pinion/engine/plan/step_gaps.h"

namespace pinion {

// Whom to send away where a stretch needs room.
enum class Choice {
  kHighest,  // of the highest rank
  kFitting,  // the same, but the smallest that makes enough room if one alone does
};

// Gaps (by index) of objects that are on the device and idle.
class IdleGaps {
 public:
  // The higher a gap's rank, the sooner it goes; of equal ones the first, whose copy is done first.
  IdleGaps(const std::vector<Gap>& gaps, const std::vector<uint32_t>& ranks, Choice choice)
      : gaps_(gaps), ranks_(ranks), choice_(choice), is_idle_(gaps.size()) {}

  void Add(size_t gap) {
    is_idle_[gap] = true;
    by_rank_.emplace(ranks_[gap], -static_cast<int64_t>(gap));
    if (choice_ == Choice::kFitting) by_size_.insert(BySize(gap));
  }
  void Remove(size_t gap) {
    is_idle_[gap] = false;
    if (choice_ == Choice::kFitting) by_size_.erase(BySize(gap));
  }
  // Whom to send away where so much is too much. There is one.
  size_t Choose(int64_t excess_bytes) {
    while (!is_idle_[-by_rank_.top().second]) by_rank_.pop();
    const auto highest = static_cast<size_t>(-by_rank_.top().second);
    if (choice_ == Choice::kHighest) return highest;
    const auto smallest = by_size_.lower_bound({excess_bytes, 0, 0});
    if (smallest == by_size_.end()) return highest;
    return std::get<2>(
        *std::prev(by_size_.upper_bound({std::get<0>(*smallest), UINT32_MAX, SIZE_MAX})));
  }

 private:
  std::tuple<int64_t, uint32_t, size_t> BySize(size_t gap) const {
    return {gaps_[gap].size_bytes, ranks_[gap], gap};
  }

  const std::vector<Gap>& gaps_;
  const std::vector<uint32_t>& ranks_;
  const Choice choice_;
  std::vector<bool> is_idle_;
  std::priority_queue<std::pair<uint32_t, int64_t>> by_rank_;  // and some that are not idle
  absl::btree_set<std::tuple<int64_t, uint32_t, size_t>> by_size_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_IDLE_GAPS_H_
