#include "pinion/engine/planner/explain_plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/residency_planner.h"
#include "pinion/engine/planner/step_simulation.h"

namespace pinion {
namespace {

std::string Ms(double us) { return absl::StrFormat("%.3f", us / 1e3); }

// Stall of the compute at an access, split into waits for copies out and for copies in.
struct Waited {
  double out_us = 0;
  double in_us = 0;
};

Waited WaitedAt(const StepTimes& times, const std::vector<StepMove>& moves, size_t access) {
  const double arrived_us = times.begins_us[access + 1] - times.stalls_us[access + 1];
  double out_us = arrived_us;
  for (size_t i = 0; i < moves.size(); ++i) {
    if (moves[i].evict_at == access) out_us = std::max(out_us, times.out_us[i]);
  }
  return {out_us - arrived_us, times.begins_us[access + 1] - out_us};
}

// A set of objects and their bytes.
struct Some {
  absl::flat_hash_set<uint32_t> objects;
  uint64_t bytes = 0;

  void Add(uint32_t object, uint64_t size_bytes) {
    if (objects.insert(object).second) bytes += size_bytes;
  }
};

void AppendWhatStays(const StepTrace& step, const StepPlan& plan, uint64_t all_bytes,
                     const std::vector<ObjectLiveness>& lives, std::string& text) {
  constexpr size_t kMostShown = 10;
  const std::vector<absl::string_view> why = WhyObjectsStay(step, plan);
  std::vector<uint32_t> stay(step.objects.size());
  std::iota(stay.begin(), stay.end(), 0);
  std::erase_if(stay, [&why](uint32_t object) { return why[object].empty(); });
  if (stay.empty()) return;
  const auto size_bytes = [&step](uint32_t object) { return step.objects[object].size_bytes; };
  std::stable_sort(stay.begin(), stay.end(),
                   [&](uint32_t a, uint32_t b) { return size_bytes(a) > size_bytes(b); });
  uint64_t bytes = 0;
  std::map<absl::string_view, Some> by_reason;
  for (const uint32_t object : stay) {
    bytes += size_bytes(object);
    by_reason[why[object]].Add(object, size_bytes(object));
  }
  std::multimap<uint64_t, std::string> sums;
  for (const auto& [reason, some] : by_reason) {
    sums.emplace(some.bytes, absl::StrFormat("  %6d %10s  %s\n", some.objects.size(),
                                             HumanBytes(some.bytes), reason));
  }
  absl::StrAppendFormat(&text, "stay: %d of %d objects, %s of %s\n", stay.size(), why.size(),
                        HumanBytes(bytes), HumanBytes(all_bytes));
  for (auto sum = sums.rbegin(); sum != sums.rend(); ++sum) text += sum->second;
  absl::StrAppendFormat(&text, "  %6s %10s %6s %6s\n", "object", "size", "made", "read");
  for (size_t i = 0; i < std::min(kMostShown, stay.size()); ++i) {
    const std::vector<size_t>& accesses = lives[stay[i]].accesses;
    const bool is_read = accesses.size() > lives[stay[i]].saves;
    absl::StrAppendFormat(&text, "  %6d %10s %6d %6s  %s\n", stay[i],
                          HumanBytes(size_bytes(stay[i])), accesses.front(),
                          is_read ? absl::StrCat(accesses.back()) : "never", why[stay[i]]);
  }
  if (stay.size() > kMostShown) {
    absl::StrAppendFormat(&text, "  and %d more\n", stay.size() - kMostShown);
  }
}

}  // namespace

std::vector<absl::string_view> WhyObjectsStay(const StepTrace& step, const StepPlan& plan) {
  const absl::Status checked = CheckMoves(step, plan.moves);
  PINION_CHECK(checked.ok()) << "WhyObjectsStay: " << checked.message();
  std::vector<absl::string_view> why(step.objects.size(), "in use as long as the step needs it");
  const auto set_where_idle = [&why](const StepTrace& trace, absl::string_view reason) {
    for (const IdleInterval& idle : IdleIntervalsOf(trace)) why[idle.object] = reason;
  };
  // The strictest trace in which an object is idle decides, so it comes last.
  StepTrace freer = step;
  for (StepObject& object : freer.objects) object.held_until = object.saved_until = 0;
  set_where_idle(freer, "saved again by a later operator, and in use from then on");
  for (size_t i = 0; i < why.size(); ++i) {
    freer.objects[i].saved_until = step.objects[i].saved_until;
  }
  set_where_idle(freer, "referenced by the program until it is read");
  set_where_idle(step, "there is room for it");
  const std::vector<int64_t> bytes = DeviceBytes(step, plan.moves);
  std::vector<size_t> peaks;  // intervals
  for (size_t i = 0; plan.less_is_slower && i < bytes.size(); ++i) {
    if (bytes[i] >= static_cast<int64_t>(plan.peak_bytes)) peaks.push_back(i);
  }
  for (const IdleInterval& idle : IdleIntervalsOf(step)) {
    const auto peak = std::lower_bound(peaks.begin(), peaks.end(), idle.first);
    if (peak == peaks.end() || *peak > idle.last) continue;
    why[idle.object] = "with less memory the step would be slower than kAutoTarget allows";
  }
  for (size_t i = 0; i < why.size(); ++i) {
    if (!step.objects[i].frees) why[i] = "referenced by the program, so moving it frees nothing";
  }
  for (const StepMove& move : plan.moves) why[move.object] = "";
  return why;
}

std::string ExplainPlan(const StepTrace& step, const StepPlan& plan, const LinkCalibration& link) {
  const absl::StatusOr<StepTimes> times = SimulateStep(step, plan.moves, link);
  if (!times.ok()) return absl::StrCat(times.status().message(), "\n");
  uint64_t all_bytes = 0;
  for (const StepObject& object : step.objects) all_bytes += object.size_bytes;
  Some moved, computed;
  for (const StepMove& move : plan.moves) {
    const StepObject& object = step.objects[move.object];
    (object.recast_us.has_value() ? computed : moved).Add(move.object, object.size_bytes);
  }
  Waited total;
  for (size_t access = 0; access < step.accesses.size(); ++access) {
    if (times->stalls_us[access + 1] == 0) continue;
    const Waited waited = WaitedAt(*times, plan.moves, access);
    total.out_us += waited.out_us;
    total.in_us += waited.in_us;
  }
  const double compute_us = step.compute_us();
  std::string text = absl::StrFormat(
      "%s ms (modelled), %.3f x the compute alone (%s ms%s), within %s; %d of %d objects move, %s "
      "of %s\nstalls: %s ms for copies out, %s ms for copies in\n",
      Ms(times->step_us), compute_us > 0 ? times->step_us / compute_us : 1.0, Ms(compute_us),
      step.timed_by_host ? ", by the host's clock" : "", HumanBytes(plan.peak_bytes),
      moved.objects.size(), step.objects.size(), HumanBytes(moved.bytes), HumanBytes(all_bytes),
      Ms(total.out_us), Ms(total.in_us));
  if (!computed.objects.empty()) {
    absl::StrAppendFormat(&text, "recast: %d, %s\n", computed.objects.size(),
                          HumanBytes(computed.bytes));
  }
  std::vector<size_t> again;
  size_t segments = 0;  // without those inside a recomputed one
  for (size_t i = 0; i < step.segments.size(); ++i) {
    const StepSegment& segment = step.segments[i];
    if (segment.outer.has_value() && step.segments[*segment.outer].is_recomputed) continue;
    ++segments;
    if (segment.is_recomputed) again.push_back(i);
  }
  if (!again.empty()) {
    absl::StrAppendFormat(&text, "segments recomputed: %d of %d (%s)\n", again.size(), segments,
                          absl::StrJoin(again, ", "));
  }
  const std::vector<ObjectLiveness> lives = LivenessOf(step);
  if (!plan.moves.empty()) {
    absl::StrAppendFormat(&text, "  %6s %10s %6s %10s %6s %6s %6s %10s\n", "object", "size", "made",
                          "out, ms", "gone", "back", "read", "in, ms");
  }
  for (size_t i = 0; i < plan.moves.size(); ++i) {
    const StepMove& move = plan.moves[i];
    const bool comes_back = move.fetch_at != StepMove::kNever;
    const auto access = [comes_back](uint32_t ordinal) {
      return comes_back ? absl::StrCat(ordinal) : "never";
    };
    absl::StrAppendFormat(
        &text, "  %6d %10s %6d %10s %6d %6s %6s %10s\n", move.object,
        HumanBytes(step.objects[move.object].size_bytes), lives[move.object].accesses.front(),
        move.copies_out ? Ms(times->out_us[i]) : "-", move.evict_at, access(move.fetch_at),
        access(move.read_at), comes_back ? Ms(times->in_us[i]) : "-");
  }
  AppendWhatStays(step, plan, all_bytes, lives, text);
  return text;
}

std::string ExplainPlan(const PlannedStep& planned) {
  std::string text = ExplainPlan(planned.step, planned.plan, planned.link);
  if (!planned.note.empty()) absl::StrAppend(&text, "  ", planned.note, "\n");
  return text;
}

}  // namespace pinion
