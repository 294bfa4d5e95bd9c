#include "pinion/engine/planner/explain_plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/planner/liveness.h"
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

}  // namespace

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
  if (plan.moves.empty()) return text;
  const std::vector<ObjectLiveness> lives = LivenessOf(step);
  absl::StrAppendFormat(&text, "  %6s %10s %6s %10s %6s %6s %6s %10s\n", "object", "size", "made",
                        "out, ms", "gone", "back", "read", "in, ms");
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
  return text;
}

std::string ExplainPlan(const PlannedStep& planned) {
  std::string text = ExplainPlan(planned.step, planned.plan, planned.link);
  if (!planned.note.empty()) absl::StrAppend(&text, "  ", planned.note, "\n");
  return text;
}

}  // namespace pinion
