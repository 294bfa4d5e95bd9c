#include "pinion/programs/plan_drawing.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "nlohmann/json.hpp"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/planner/explain_plan.h"
#include "pinion/programs/plan_timeline.h"

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
