#include "pinion/programs/step_bound.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/liveness.h"

namespace pinion {
namespace {

// The intervals in which an object may be offloaded, in the order of one direction's copies.
struct IdleSpan {
  size_t first = 0;
  size_t last = 0;
  size_t ready = 0;  // the object's copy begins when this interval has ended, or later
  int64_t size_bytes = 0;
};

// An interval as the copies of one direction see it.
struct Need {
  double compute_us = 0;
  int64_t fixed_bytes = 0;  // on the device in any case
  int64_t begun_bytes = 0;  // of objects that may have begun to leave before its end
};

// The needs of a step in the order in which one direction meets them.
struct Needs {
  std::vector<Need> intervals;
  std::vector<IdleSpan> idle;
};

// The first has the order of the step, the second that of reversed time.
struct BothWays {
  Needs out;
  Needs in;
};

// Returns the intervals until `over` in which an object is in use, ascending: the one that makes it
// and the one after each later access. Also all until its last save, and as long as the program
// references it.
std::vector<int64_t> InUse(const StepObject& object, const ObjectLiveness& life, size_t over) {
  size_t held_until = std::max(life.made(), std::min<size_t>(object.held_until, over));
  for (const size_t access : life.accesses) {
    const bool saves = life.made() < access && access <= object.saved_until;
    if (saves) held_until = std::max(held_until, access + 1);
  }
  std::vector<int64_t> in_use(held_until - life.made() + 1);
  std::iota(in_use.begin(), in_use.end(), static_cast<int64_t>(life.made()));
  for (const size_t access : life.accesses) {
    if (life.made() < access && held_until <= access) {
      in_use.push_back(static_cast<int64_t>(access) + 1);
    }
  }
  return in_use;
}

// Calls `add(first, last)` for what is not in use of the intervals from `begin` to `end`.
template <typename Add>
void ForIdle(const std::vector<int64_t>& in_use, int64_t begin, int64_t end, const Add& add) {
  for (const int64_t interval : in_use) {
    if (interval < begin) continue;
    if (interval > end) break;
    if (begin < interval) add(begin, interval - 1);
    begin = interval + 1;
  }
  if (begin <= end) add(begin, end);
}

BothWays NeedsOf(const StepTrace& step) {
  const std::vector<ObjectLiveness> lives = LivenessOf(step);
  const std::vector<size_t> leaves_from = EarliestOffloads(step);
  const std::vector<size_t> operator_ends = OperatorEnds(step);
  const auto count = static_cast<int64_t>(step.intervals.size());
  BothWays needs;
  for (const StepInterval& interval : step.intervals) {
    needs.out.intervals.push_back(
        {.compute_us = interval.compute_us,
         .fixed_bytes = static_cast<int64_t>(interval.peak_other_bytes())});
  }
  needs.in.intervals.assign(needs.out.intervals.rbegin(), needs.out.intervals.rend());
  const auto add_fixed = [&](int64_t interval, int64_t size) {
    needs.out.intervals[interval].fixed_bytes += size;
    needs.in.intervals[count - 1 - interval].fixed_bytes += size;
  };
  for (size_t index = 0; index < lives.size(); ++index) {
    const StepObject& object = step.objects[index];
    const ObjectLiveness& life = lives[index];
    // What dropping does not free is among the other bytes.
    if (!object.frees) continue;
    const auto size = static_cast<int64_t>(object.size_bytes);
    const auto made = static_cast<int64_t>(life.made());
    // What is never read may be gone before the step is over.
    const auto over = static_cast<int64_t>(
        life.is_read() ? life.accesses.back() + 1 : LastIntervalOf(object, life, operator_ends));
    const std::vector<int64_t> in_use = InUse(object, life, over);
    for (const int64_t interval : in_use) add_fixed(interval, size);
    // It may come and go as it likes.
    if (object.recast_us.has_value()) continue;
    // It leaves behind this interval.
    const int64_t leaves = std::max(made, static_cast<int64_t>(leaves_from[index]));
    ForIdle(in_use, made, std::min(leaves, over), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i <= last; ++i) add_fixed(i, size);
    });
    ForIdle(in_use, leaves + 1, over, [&](int64_t first, int64_t last) {
      needs.out.idle.push_back({static_cast<size_t>(first), static_cast<size_t>(last),
                                static_cast<size_t>(leaves), size});
    });
    for (int64_t i = leaves + 1; i <= over; ++i) needs.out.intervals[i].begun_bytes += size;
    if (!life.is_read()) continue;
    ForIdle(in_use, leaves + 1, over - 1, [&](int64_t first, int64_t last) {
      const auto reversed_first = static_cast<size_t>(count - 1 - last);
      needs.in.idle.push_back(
          {reversed_first, static_cast<size_t>(count - 1 - first), reversed_first - 1, size});
    });
    for (int64_t i = made; i < over; ++i) {
      needs.in.intervals[count - 1 - i].begun_bytes += size;
    }
  }
  return needs;
}

// How much of some objects fits into a room, each as a whole or not at all.
class Fitting {
 public:
  explicit Fitting(int64_t room_bytes) : room_bytes_(room_bytes) {}

  void Add(int64_t size_bytes) {
    total_bytes_ += size_bytes;
    if (!is_exact_ || size_bytes > room_bytes_) return;
    const size_t count = sums_.size();
    for (size_t i = 0; i < count && sums_[i] + size_bytes <= room_bytes_; ++i) {
      sums_.push_back(sums_[i] + size_bytes);
    }
    std::inplace_merge(sums_.begin(), sums_.begin() + static_cast<ptrdiff_t>(count), sums_.end());
    sums_.erase(std::unique(sums_.begin(), sums_.end()), sums_.end());
    is_exact_ = sums_.size() <= kMostSums;
  }
  int64_t total_bytes() const { return total_bytes_; }
  // Where sizes make too many different sums, as much as if the objects could be cut.
  int64_t most_bytes() const {
    return is_exact_ ? sums_.back() : std::min(total_bytes_, room_bytes_);
  }

 private:
  static constexpr size_t kMostSums = 64;

  const int64_t room_bytes_;
  int64_t total_bytes_ = 0;
  std::vector<int64_t> sums_ = {0};  // of some of them, that fit; ascending
  bool is_exact_ = true;
};

struct Waits {
  std::vector<double> before_us;  // each interval, all waits together, and behind the last
  double moved_bytes = 0;         // the least that moves
};

// Returns the waits for intervals that fit. For each interval p and each earlier interval b it sums
// the bytes that must be offloaded in p and cannot start before b has ended. The link needs that
// time.
Waits WaitsFor(Needs needs, int64_t memory_bytes, double bytes_per_us) {
  Waits waits;
  std::sort(needs.idle.begin(), needs.idle.end(),
            [](const IdleSpan& a, const IdleSpan& b) { return a.first < b.first; });
  auto next = needs.idle.begin();
  std::vector<IdleSpan> idle;  // that the interval is part of, by `ready`, the latest first
  int64_t asked_bytes = 0;     // that have left, of objects which live, if they leave at need only
  double compute_us = 0;
  std::vector<double> ends_us;
  // In the end there is room for nothing.
  needs.intervals.push_back({.fixed_bytes = memory_bytes});
  for (size_t i = 0; i < needs.intervals.size(); ++i) {
    const Need& need = needs.intervals[i];
    std::erase_if(idle, [i](const IdleSpan& span) { return span.last < i; });
    for (; next != needs.idle.end() && next->first == i; ++next) {
      const auto later = [](const IdleSpan& a, const IdleSpan& b) { return a.ready > b.ready; };
      idle.insert(std::upper_bound(idle.begin(), idle.end(), *next, later), *next);
    }
    int64_t idle_bytes = 0;
    for (const IdleSpan& span : idle) idle_bytes += span.size_bytes;
    const int64_t room_bytes = memory_bytes - need.fixed_bytes;
    double begin_us = ends_us.empty() ? 0 : ends_us.back();
    Fitting fitting(room_bytes);
    for (const IdleSpan& span : idle) {
      if (idle_bytes <= room_bytes) break;
      const double ready_us = ends_us[span.ready];
      if (ready_us + static_cast<double>(idle_bytes) / bytes_per_us <= begin_us) break;
      fitting.Add(span.size_bytes);
      const auto away_bytes = static_cast<double>(fitting.total_bytes() - fitting.most_bytes());
      begin_us = std::max(begin_us, ready_us + away_bytes / bytes_per_us);
    }
    const int64_t must_be_away = std::max<int64_t>(0, idle_bytes - room_bytes);
    if (i + 1 < needs.intervals.size()) asked_bytes = std::min(asked_bytes, need.begun_bytes);
    waits.moved_bytes += static_cast<double>(std::max<int64_t>(0, must_be_away - asked_bytes));
    asked_bytes = std::max(asked_bytes, must_be_away);
    waits.before_us.push_back(begin_us - compute_us);
    compute_us += need.compute_us;
    ends_us.push_back(begin_us + need.compute_us);
  }
  return waits;
}

}  // namespace

absl::StatusOr<double> StepLowerBoundUs(const StepTrace& step, uint64_t memory_bytes,
                                        const LinkCalibration& link) {
  PINION_RETURN_IF_ERROR(step.Validate());
  PINION_ASSIGN_OR_RETURN(const LinkRates rates, RatesOf(link));
  BothWays needs = NeedsOf(step);
  // An interval's fixed bytes may be less than nothing, and the room beside them must not overflow.
  const int64_t memory = static_cast<int64_t>(
      std::min<uint64_t>(memory_bytes, std::numeric_limits<int64_t>::max() / 2));
  for (const Need& need : needs.out.intervals) {
    if (need.fixed_bytes > memory) return std::numeric_limits<double>::infinity();
  }
  const Waits out = WaitsFor(std::move(needs.out), memory, rates.out);
  const Waits in = WaitsFor(std::move(needs.in), memory, rates.in);
  double waits_us = std::max(out.before_us.back(), in.before_us.back());
  // What is waited for before an interval, and behind it.
  for (size_t i = 0; i < step.intervals.size(); ++i) {
    waits_us = std::max(waits_us, out.before_us[i] + in.before_us[step.intervals.size() - 1 - i]);
  }
  return std::max(step.compute_us() + waits_us, LinkUs(out.moved_bytes, in.moved_bytes, rates));
}

}  // namespace pinion
