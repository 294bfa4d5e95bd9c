#include "pinion/programs/plan_timeline.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/planner/explain_plan.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/step_simulation.h"

namespace pinion {
namespace {

class TimelineMaker {
 public:
  TimelineMaker(const StepTrace& step, const StepPlan& plan, const StepTimes& times,
                uint64_t limit_bytes)
      : step_(step),
        moves_(plan.moves),
        times_(times),
        limit_bytes_(static_cast<int64_t>(limit_bytes)),
        bytes_(DeviceBytes(step, plan.moves)),
        why_stays_(WhyObjectsStay(step, plan)) {}

  PlanTimeline Make() const {
    PlanTimeline timeline;
    timeline.step_us = times_.step_us;
    timeline.limit_bytes = static_cast<uint64_t>(limit_bytes_);
    AddCompute(timeline);
    AddObjects(timeline);
    for (size_t i = 0; i < moves_.size(); ++i) {
      const StepMove& move = moves_[i];
      const std::string& why = timeline.objects[move.object].why;
      if (move.copies_out) {
        timeline.copies_out.push_back({times_.out_begins_us[i], times_.out_us[i], why});
      }
      if (move.fetch_at != StepMove::kNever && !IsRecast(move)) {
        timeline.copies_in.push_back({times_.in_begins_us[i], times_.in_us[i], why});
      }
    }
    return timeline;
  }

 private:
  std::string Name(uint32_t object) const {
    return absl::StrCat("object ", object, ", ", HumanBytes(step_.objects[object].size_bytes));
  }
  bool IsRecast(const StepMove& move) const {
    return step_.objects[move.object].recast_us.has_value();
  }
  // When the compute gets to the use.
  double ArrivalUs(size_t access) const {
    return times_.begins_us[access] + step_.intervals[access].compute_us;
  }

  void AddCompute(PlanTimeline& timeline) const {
    double begin_us = 0;
    for (size_t i = 0; i < step_.intervals.size(); ++i) {
      const double waited_us = times_.stalls_us[i];
      timeline.device.push_back({times_.begins_us[i] - waited_us,
                                 static_cast<uint64_t>(std::max<int64_t>(0, bytes_[i]))});
      if (waited_us == 0) continue;
      timeline.compute.push_back({begin_us, ArrivalUs(i - 1), "compute"});
      begin_us = times_.begins_us[i];
      timeline.waits.push_back({ArrivalUs(i - 1), begin_us, WhyWaited(i - 1)});
    }
    timeline.compute.push_back({begin_us, times_.step_us, "compute"});
  }

  std::string WhyWaited(size_t access) const {
    std::vector<std::string> copies;
    for (size_t i = 0; i < moves_.size(); ++i) {
      const StepMove& move = moves_[i];
      if (move.evict_at == access && times_.out_us[i] > ArrivalUs(access)) {
        copies.push_back(absl::StrCat("the copy out of ", Name(move.object)));
      }
      if (move.read_at == access && !IsRecast(move) && times_.in_us[i] > ArrivalUs(access)) {
        copies.push_back(absl::StrCat("the copy in of ", Name(move.object)));
      }
    }
    return absl::StrFormat("access %d waits %.3f ms for %s", access,
                           times_.stalls_us[access + 1] / 1e3, absl::StrJoin(copies, " and "));
  }

  std::string WhenBack(const StepMove& move) const {
    if (move.fetch_at == StepMove::kNever) return ", not read any more";
    if (IsRecast(move)) return absl::StrCat(", recast at access ", move.read_at);
    return absl::StrCat(" until access ", move.fetch_at, ", its next read is access ",
                        move.read_at);
  }

  // What would be too much if the object had stayed, and where.
  std::string TooMuch(const StepMove& move) const {
    const size_t until = std::min<size_t>(move.fetch_at, step_.accesses.size());
    const auto most =
        std::max_element(bytes_.begin() + move.evict_at + 1, bytes_.begin() + until + 1);
    const int64_t size_bytes = static_cast<int64_t>(step_.objects[move.object].size_bytes);
    const int64_t too_much_bytes = *most + size_bytes - limit_bytes_;
    if (too_much_bytes <= 0) return "";
    return absl::StrCat("; if it stayed, ", HumanBytes(static_cast<uint64_t>(too_much_bytes)),
                        " too much before access ", most - bytes_.begin());
  }

  void AddObjects(PlanTimeline& timeline) const {
    const std::vector<ObjectLiveness> lives = LivenessOf(step_);
    const std::vector<size_t> operator_ends = OperatorEnds(step_);
    std::vector<std::vector<size_t>> moves_of(step_.objects.size());
    for (size_t i = 0; i < moves_.size(); ++i) moves_of[moves_[i].object].push_back(i);
    for (uint32_t id = 0; id < step_.objects.size(); ++id) {
      const StepObject& object = step_.objects[id];
      std::vector<size_t>& mine = moves_of[id];
      std::sort(mine.begin(), mine.end(),
                [this](size_t a, size_t b) { return moves_[a].evict_at < moves_[b].evict_at; });
      const size_t last = LastIntervalOf(object, lives[id], operator_ends);
      PlanTimeline::Object shown;
      shown.moves = !mine.empty();
      shown.why = absl::StrCat(Name(id), mine.empty() ? ": stays, " : "", why_stays_[id]);
      double begin_us = times_.begins_us[lives[id].made()];
      bool comes_back = true;
      for (const size_t i : mine) {
        const StepMove& move = moves_[i];
        comes_back = move.fetch_at != StepMove::kNever;
        absl::StrAppend(&shown.why, ": away behind access ", move.evict_at, WhenBack(move),
                        TooMuch(move));
        const double gone_us = std::max(ArrivalUs(move.evict_at), times_.out_us[i]);
        shown.there.push_back({begin_us, gone_us, ""});
        if (comes_back) begin_us = ArrivalUs(move.fetch_at);
      }
      if (comes_back) {
        shown.there.push_back(
            {begin_us, times_.begins_us[last] + step_.intervals[last].compute_us, ""});
      }
      timeline.objects.push_back(std::move(shown));
    }
  }

  const StepTrace& step_;
  const std::vector<StepMove>& moves_;
  const StepTimes& times_;
  const int64_t limit_bytes_;
  const std::vector<int64_t> bytes_;                // by interval
  const std::vector<absl::string_view> why_stays_;  // by object
};

}  // namespace

absl::StatusOr<PlanTimeline> TimelineOf(const StepTrace& step, const StepPlan& plan,
                                        const LinkCalibration& link, uint64_t limit_bytes) {
  PINION_ASSIGN_OR_RETURN(const StepTimes times, SimulateStep(step, plan.moves, link));
  return TimelineMaker(step, plan, times, limit_bytes).Make();
}

}  // namespace pinion
