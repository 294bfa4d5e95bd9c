#include "pinion/programs/plan_drawing.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/step_simulation.h"

namespace pinion {
namespace {

constexpr double kLeft = 100, kWidth = 1080;
constexpr double kTitleTop = 16, kNoteTop = 32;
constexpr double kLaneHeight = 18;
constexpr double kComputeTop = 40, kOutTop = 64, kInTop = 88;
constexpr double kObjectsTop = 120, kObjectsHeight = 200;
constexpr double kBytesTop = 340, kBytesHeight = 180;
constexpr double kThinnest = 0.3;  // what is shorter or flatter would not be seen

std::string Escaped(const std::string& text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
}

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

class SvgWriter {
 public:
  SvgWriter(const PlanTimeline& timeline, std::string& svg) : timeline_(timeline), svg_(svg) {}

  void AddLane(const char* name, double top, const char* color,
               const std::vector<PlanTimeline::Slice>& slices) {
    AddText(kLeft - 8, top + 13, "end", name);
    absl::StrAppend(&svg_, "<g fill='", color, "'>\n");
    for (const PlanTimeline::Slice& slice : slices) {
      AddRect(slice, top, kLaneHeight, slice.what);
    }
    absl::StrAppend(&svg_, "</g>\n");
  }

  void AddObjects() {
    AddText(kLeft - 8, kObjectsTop + 13, "end", "objects");
    AddText(kLeft - 8, kObjectsTop + 29, "end", "(gray: stay)");
    const double height =
        kObjectsHeight / static_cast<double>(std::max<size_t>(1, timeline_.objects.size()));
    for (const bool moves : {false, true}) {
      absl::StrAppend(&svg_, "<g fill='", moves ? "#4c78a8" : "#b8b8b8", "'>\n");
      for (size_t i = 0; i < timeline_.objects.size(); ++i) {
        const PlanTimeline::Object& object = timeline_.objects[i];
        if (object.moves != moves) continue;
        for (const PlanTimeline::Slice& there : object.there) {
          AddRect(there, kObjectsTop + height * static_cast<double>(i), 0.9 * height, object.why);
        }
      }
      absl::StrAppend(&svg_, "</g>\n");
    }
  }

  void AddBytes() {
    uint64_t most_bytes = timeline_.limit_bytes;
    for (const PlanTimeline::Bytes& at : timeline_.device) {
      most_bytes = std::max(most_bytes, at.bytes);
    }
    const auto y = [most_bytes](uint64_t bytes) {
      return kBytesTop +
             kBytesHeight * (1 - static_cast<double>(bytes) /
                                     static_cast<double>(std::max<uint64_t>(1, most_bytes)));
    };
    absl::StrAppendFormat(&svg_, "<path fill='#dbe6f1' stroke='#4c78a8' d='M%.1f %.1f", kLeft,
                          kBytesTop + kBytesHeight);
    for (const PlanTimeline::Bytes& at : timeline_.device) {
      absl::StrAppendFormat(&svg_, "H%.1fV%.1f", X(at.begin_us), y(at.bytes));
    }
    absl::StrAppendFormat(&svg_, "H%.1fV%.1fZ'/>\n", X(timeline_.step_us),
                          kBytesTop + kBytesHeight);
    const double limit_y = y(timeline_.limit_bytes);
    absl::StrAppendFormat(&svg_,
                          "<path stroke='#d62728' stroke-dasharray='6 3' d='M%.1f %.1fH%.1f'/>\n",
                          kLeft, limit_y, kLeft + kWidth);
    AddText(kLeft - 8, limit_y + 4, "end", HumanBytes(timeline_.limit_bytes));
    AddText(kLeft - 8, kBytesTop + kBytesHeight, "end", "device, 0");
    AddText(kLeft, kBytesTop + kBytesHeight + 16, "start", "0 ms");
    AddText(kLeft + kWidth, kBytesTop + kBytesHeight + 16, "end",
            absl::StrFormat("%.3f ms (modelled)", timeline_.step_us / 1e3));
  }

  void AddText(double x, double y, const char* anchor, const std::string& text) {
    absl::StrAppendFormat(&svg_, "<text x='%.1f' y='%.1f' text-anchor='%s'>%s</text>\n", x, y,
                          anchor, Escaped(text));
  }

 private:
  double X(double us) const {
    return kLeft + (timeline_.step_us > 0 ? kWidth * us / timeline_.step_us : 0);
  }

  void AddRect(const PlanTimeline::Slice& slice, double top, double height,
               const std::string& tip) {
    const double left = X(slice.begin_us);
    absl::StrAppendFormat(&svg_,
                          "<rect x='%.1f' y='%.1f' width='%.1f' "
                          "height='%.2f'><title>%s</title></rect>\n",
                          left, top, std::max(kThinnest, X(slice.end_us) - left),
                          std::max(kThinnest, height), Escaped(tip));
  }

  const PlanTimeline& timeline_;
  std::string& svg_;
};

}  // namespace

absl::StatusOr<PlanTimeline> TimelineOf(const StepTrace& step, const StepPlan& plan,
                                        const LinkCalibration& link, uint64_t limit_bytes) {
  PINION_ASSIGN_OR_RETURN(const StepTimes times, SimulateStep(step, plan.moves, link));
  return TimelineMaker(step, plan, times, limit_bytes).Make();
}

std::string SvgOf(const PlanTimeline& timeline, const std::string& title) {
  std::string svg =
      "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 1200 550' "
      "font-family='sans-serif' "
      "font-size='12'>\n<rect width='1200' height='550' fill='white'/>\n";
  SvgWriter writer(timeline, svg);
  writer.AddText(kLeft, kTitleTop, "start", title);
  writer.AddText(kLeft, kNoteTop, "start", timeline.note);
  writer.AddLane("compute", kComputeTop, "#54a24b", timeline.compute);
  writer.AddLane("", kComputeTop, "#d62728", timeline.waits);
  writer.AddLane("copies out", kOutTop, "#f58518", timeline.copies_out);
  writer.AddLane("copies in", kInTop, "#4c78a8", timeline.copies_in);
  writer.AddObjects();
  writer.AddBytes();
  absl::StrAppend(&svg, "</svg>\n");
  return svg;
}

std::string ChromeTraceOf(const PlanTimeline& timeline) {
  nlohmann::json events = nlohmann::json::array();
  const auto add_row = [&events](int row, const char* name,
                                 const std::vector<PlanTimeline::Slice>& slices) {
    events.push_back({{"ph", "M"},
                      {"pid", 1},
                      {"tid", row},
                      {"name", "thread_name"},
                      {"args", {{"name", name}}}});
    for (const PlanTimeline::Slice& slice : slices) {
      events.push_back({{"ph", "X"},
                        {"pid", 1},
                        {"tid", row},
                        {"name", slice.what},
                        {"ts", slice.begin_us},
                        {"dur", slice.end_us - slice.begin_us}});
    }
  };
  // The name is what the timeline shows; otherData is behind a menu.
  const std::string name =
      timeline.note.empty() ? "planned step" : absl::StrCat("planned step, ", timeline.note);
  events.push_back({{"ph", "M"}, {"pid", 1}, {"name", "process_name"}, {"args", {{"name", name}}}});
  add_row(1, "compute", timeline.compute);
  add_row(1, "compute", timeline.waits);
  add_row(2, "copies out", timeline.copies_out);
  add_row(3, "copies in", timeline.copies_in);
  for (const PlanTimeline::Bytes& at : timeline.device) {
    events.push_back({{"ph", "C"},
                      {"pid", 1},
                      {"name", "device"},
                      {"ts", at.begin_us},
                      {"args", {{"bytes", at.bytes}}}});
  }
  // What stays has no copy that could say why.
  std::vector<std::string> stays;
  for (const PlanTimeline::Object& object : timeline.objects) {
    if (!object.moves) stays.push_back(object.why);
  }
  return nlohmann::json{{"displayTimeUnit", "ms"},
                        {"otherData", {{"times", "modelled"}, {"stays", stays}}},
                        {"traceEvents", std::move(events)}}
      .dump();
}

std::string DrawPlan(const PlannedStep& planned, PlanDrawing drawing) {
  const std::string text = ExplainPlan(planned);
  absl::StatusOr<PlanTimeline> timeline =
      TimelineOf(planned.step, planned.plan, planned.link, planned.limit_bytes);
  if (!timeline.ok()) return text;
  timeline->note = planned.note;
  if (drawing == PlanDrawing::kChromeTrace) return ChromeTraceOf(*timeline);
  return SvgOf(*timeline, text.substr(0, text.find('\n')));
}

}  // namespace pinion
