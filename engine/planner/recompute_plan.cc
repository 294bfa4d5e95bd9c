#include "pinion/engine/planner/recompute_plan.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <random>
#include <utility>

#include "absl/status/status.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/recomputation.h"

namespace pinion {
namespace {

using Segments = std::vector<uint32_t>;  // ascending

class RecomputeSearch {
 public:
  RecomputeSearch(const StepTrace& step, uint64_t memory_bytes, const LinkCalibration& link)
      : step_(step),
        memory_bytes_(memory_bytes),
        link_(link),
        candidates_(RecomputableSegments(step)),
        left_(TriesFor(step)) {}

  // Tries sets of segments.
  absl::Status Run() {
    if (candidates_.empty()) return absl::OkStatus();
    PINION_RETURN_IF_ERROR(Try({}).status());
    if (candidates_.size() < 20 && (1 << candidates_.size()) <= left_) {
      for (uint32_t set = 1; set < 1u << candidates_.size(); ++set) {
        Segments segments;
        for (size_t i = 0; i < candidates_.size(); ++i) {
          if ((set >> i & 1) != 0) segments.push_back(candidates_[i]);
        }
        PINION_RETURN_IF_ERROR(Try(segments).status());
      }
      return absl::OkStatus();
    }
    const int for_neighbours = left_ / 4;
    Segments with_room;
    PINION_RETURN_IF_ERROR(AddWithRoom(candidates_, with_room));
    std::vector<Segments> orders = Orders(with_room.empty() ? candidates_ : with_room);
    orders.resize(OrdersWithin(left_ - for_neighbours, orders));
    for (size_t i = 0; i < orders.size(); ++i) {
      const int share = (left_ - for_neighbours) / static_cast<int>(orders.size() - i);
      PINION_RETURN_IF_ERROR(TryPrefixes(orders[i], left_ - share));
    }
    std::mt19937 random;  // a fixed seed: a step always gets the same plan
    while (left_ > 0) PINION_RETURN_IF_ERROR(Try(Neighbour(best_, random)).status());
    return absl::OkStatus();
  }

  // The sets with which the step is shortest, the shortest first.
  std::vector<Segments> Best() const {
    constexpr size_t kPlannedAccesses = 500;
    constexpr size_t kLeast = 2;
    const size_t most = std::max(kLeast, kPlannedAccesses / (step_.accesses.size() + 1));
    std::vector<const std::pair<const Segments, double>*> tried;
    for (const auto& segments_us : tried_us_) {
      if (!segments_us.first.empty() && std::isfinite(segments_us.second)) {
        tried.push_back(&segments_us);
      }
    }
    // Equally good sets keep the map's order, so that a step always gets the same plan.
    std::stable_sort(tried.begin(), tried.end(),
                     [](const auto* a, const auto* b) { return a->second < b->second; });
    tried.resize(std::min(most, tried.size()));
    std::vector<Segments> best;
    for (const auto* segments_us : tried) best.push_back(segments_us->first);
    return best;
  }

 private:
  static int TriesFor(const StepTrace& step) {
    constexpr size_t kTriedAccesses = 50'000;
    constexpr size_t kMost = 200;
    constexpr size_t kLeast = 12;
    return static_cast<int>(std::clamp(kTriedAccesses / (step.accesses.size() + 1), kLeast, kMost));
  }

  // Appends those of the segments that fit if all others are kept and offloaded. If they do not fit
  // together, their halves are tried. A segment inside another one that fits counts as fitting.
  absl::Status AddWithRoom(absl::Span<const uint32_t> segments, Segments& with_room) const {
    PINION_ASSIGN_OR_RETURN(const uint64_t least_bytes,
                            LeastMemoryBytes(WithRecomputation(step_, Outermost(segments))));
    const size_t half = segments.size() / 2;
    if (least_bytes <= memory_bytes_) {
      with_room.insert(with_room.end(), segments.begin(), segments.end());
    } else if (half > 0) {
      PINION_RETURN_IF_ERROR(AddWithRoom(segments.first(half), with_room));
      PINION_RETURN_IF_ERROR(AddWithRoom(segments.subspan(half), with_room));
    }
    return absl::OkStatus();
  }

  // How many of the orders these tries are enough for. At least one of the outermost and one of the
  // innermost segments.
  static size_t OrdersWithin(int tries, const std::vector<Segments>& orders) {
    constexpr double kNarrows = 1.5;  // per two tries of TryPrefixes
    constexpr size_t kLeast = 2;
    double needed = 0;
    size_t count = 0;
    while (count < orders.size()) {
      needed += 3 + 2 * std::log(static_cast<double>(orders[count].size())) / std::log(kNarrows);
      if (++count > kLeast && needed > tries) return count - 1;
    }
    return count;
  }

  // Removes segments that lie inside another one of the set.
  Segments Outermost(absl::Span<const uint32_t> segments) const {
    Segments outermost;
    for (const uint32_t segment : segments) {
      const bool is_inside = std::any_of(outermost.begin(), outermost.end(), [&](uint32_t outer) {
        return IsInside(step_.segments, segment, outer);
      });
      if (!is_inside) outermost.push_back(segment);
    }
    return outermost;
  }

  // Returns the time of the step with these segments recomputed; infinity if it does not fit.
  absl::StatusOr<double> Try(const Segments& with) {
    Segments segments = Outermost(with);
    const auto [tried, is_new] = tried_us_.try_emplace(std::move(segments));
    --left_;
    if (!is_new) return tried->second;
    const absl::StatusOr<StepPlan> plan =
        PlanStep(WithRecomputation(step_, tried->first), memory_bytes_, link_, PlanEffort::kRule);
    if (!plan.ok() && !absl::IsResourceExhausted(plan.status())) return plan.status();
    tried->second = plan.ok() ? plan->step_us : std::numeric_limits<double>::infinity();
    if (tried->second < best_us_) {
      best_us_ = tried->second;
      best_ = tried->first;
    }
    return tried->second;
  }

  // Orders of the outermost segments and of the innermost ones, alternating.
  std::vector<Segments> Orders(const Segments& segments) const {
    Segments outermost = Outermost(segments);
    Segments innermost;
    for (const uint32_t segment : segments) {
      // Inner segments follow their outer one.
      while (!innermost.empty() && IsInside(step_.segments, segment, innermost.back())) {
        innermost.pop_back();
      }
      innermost.push_back(segment);
    }
    std::vector<Segments> orders = OrdersOf(outermost);
    if (innermost == outermost) return orders;
    const std::vector<Segments> finer = OrdersOf(innermost);
    for (size_t i = 0; i < finer.size(); ++i) {
      orders.insert(orders.begin() + static_cast<ptrdiff_t>(2 * i + 1), finer[i]);
    }
    return orders;
  }

  std::vector<Segments> OrdersOf(const Segments& candidates) const {
    const size_t count = candidates.size();
    Segments spread;  // 1/2, then 1/4 and 3/4, ...
    std::vector<bool> has(count);
    for (size_t parts = 2; spread.size() < count; parts *= 2) {
      for (size_t i = 1; i < parts; i += 2) {
        const size_t at = count * i / parts;
        if (has[at] || parts > 2 * count) continue;
        has[at] = true;
        spread.push_back(candidates[at]);
      }
      if (parts <= 2 * count) continue;
      for (size_t at = 0; at < count; ++at) {
        if (!has[at]) spread.push_back(candidates[at]);
      }
    }
    Segments cheapest = candidates;
    std::vector<double> us_per_byte(step_.segments.size());
    for (const uint32_t i : candidates) us_per_byte[i] = UsPerByte(step_.segments[i]);
    std::stable_sort(cheapest.begin(), cheapest.end(),
                     [&](uint32_t a, uint32_t b) { return us_per_byte[a] < us_per_byte[b]; });
    return {std::move(spread), std::move(cheapest)};
  }

  double UsPerByte(const StepSegment& segment) const {
    double us = 0;
    double bytes = 0;
    uint32_t made = 0;
    for (const uint32_t access : segment.accesses) {
      const uint32_t object = step_.accesses[access];
      if (access > segment.accesses.front() && object <= made) continue;
      made = object;
      us += step_.intervals[access].compute_us;
      bytes += static_cast<double>(step_.objects[object].size_bytes);
    }
    return us / bytes;
  }

  // Stops when `left_after` tries are left.
  absl::Status TryPrefixes(const Segments& order, int left_after) {
    const auto try_first = [&](size_t count) {
      Segments segments(order.begin(), order.begin() + static_cast<ptrdiff_t>(count));
      std::sort(segments.begin(), segments.end());
      return Try(segments);
    };
    // With few segments the link is too slow, with many the compute grows: the best number lies in
    // between.
    size_t first = 0;
    size_t last = order.size();
    while (last - first > 2 && left_ > left_after) {
      const size_t third = (last - first) / 3;
      PINION_ASSIGN_OR_RETURN(const double fewer_us, try_first(first + third));
      PINION_ASSIGN_OR_RETURN(const double more_us, try_first(last - third));
      (fewer_us <= more_us ? last : first) = fewer_us <= more_us ? last - third : first + third;
    }
    for (size_t count = first; count <= last && left_ > left_after; ++count) {
      PINION_RETURN_IF_ERROR(try_first(count).status());
    }
    return absl::OkStatus();
  }

  // Adds or removes one or two segments. An added one replaces those that it contains or that
  // contain it.
  Segments Neighbour(Segments segments, std::mt19937& random) const {
    for (size_t changes = 1 + random() % 2; changes > 0; --changes) {
      const uint32_t changed = candidates_[random() % candidates_.size()];
      const auto at = std::lower_bound(segments.begin(), segments.end(), changed);
      if (at != segments.end() && *at == changed) {
        segments.erase(at);
      } else {
        segments.insert(at, changed);
        std::erase_if(segments, [&](uint32_t other) {
          return IsInside(step_.segments, changed, other) ||
                 IsInside(step_.segments, other, changed);
        });
      }
    }
    return segments;
  }

  const StepTrace& step_;
  const uint64_t memory_bytes_;
  const LinkCalibration& link_;
  const Segments candidates_;
  std::map<Segments, double> tried_us_;
  int left_;  // tries
  Segments best_;
  double best_us_ = std::numeric_limits<double>::infinity();
};

}  // namespace

absl::StatusOr<RecomputePlan> PlanWithRecomputation(const StepTrace& step, uint64_t memory_bytes,
                                                    const LinkCalibration& link) {
  RecomputePlan recompute;
  PINION_ASSIGN_OR_RETURN(recompute.without, PlanStep(step, memory_bytes, link));
  recompute.plan = recompute.without;
  recompute.step = step;
  // Not worth it if the link hides nearly all copies.
  constexpr double kWorthIt = 0.999;
  if (step.compute_us() >= kWorthIt * recompute.without.step_us) return recompute;
  RecomputeSearch search(step, memory_bytes, link);
  PINION_RETURN_IF_ERROR(search.Run());
  double shortest_us = kWorthIt * recompute.without.step_us;
  for (Segments& segments : search.Best()) {
    StepTrace with = WithRecomputation(step, segments);
    PINION_ASSIGN_OR_RETURN(StepPlan plan, PlanStep(with, memory_bytes, link));
    if (plan.step_us >= shortest_us) continue;
    shortest_us = plan.step_us;
    recompute.segments = std::move(segments);
    recompute.step = std::move(with);
    recompute.plan = std::move(plan);
  }
  return recompute;
}

}  // namespace pinion
