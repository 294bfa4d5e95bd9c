#include "pinion/engine/planner/step_trace.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"

namespace pinion {
namespace {

bool IsTime(double us) { return std::isfinite(us) && us >= 0; }

absl::Status CheckObject(size_t index, const StepObject& object) {
  if (object.size_bytes == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("object ", index, " has 0 bytes: leave it out of the record"));
  }
  if (object.recast_us.has_value() && !IsTime(*object.recast_us)) {
    return absl::InvalidArgumentError(
        absl::StrCat("object ", index, " cannot be computed again in ", *object.recast_us,
                     " us: give a finite time, or none where it cannot be computed"));
  }
  return absl::OkStatus();
}

absl::Status CheckSegment(size_t index, const StepSegment& segment, const StepTrace& step) {
  for (size_t i = 0; i < segment.accesses.size(); ++i) {
    const uint32_t access = segment.accesses[i];
    if (access < step.accesses.size() && (i == 0 || segment.accesses[i - 1] < access)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "segment ", index, " has access ", access, " as its number ", i, ", and the step has ",
        step.accesses.size(), " accesses: give those of the segment in ascending order"));
  }
  if (segment.outer.has_value() && *segment.outer >= index) {
    return absl::InvalidArgumentError(absl::StrCat("segment ", index, " is inside of segment ",
                                                   *segment.outer,
                                                   ", which has to begin before it"));
  }
  if (segment.outer.has_value()) {
    const std::vector<uint32_t>& around = step.segments[*segment.outer].accesses;
    if (!std::includes(around.begin(), around.end(), segment.accesses.begin(),
                       segment.accesses.end())) {
      return absl::InvalidArgumentError(
          absl::StrCat("segment ", index, " has accesses that segment ", *segment.outer,
                       " does not have, which it is inside of: add them there"));
    }
  }
  for (const uint32_t object : segment.inputs) {
    const size_t count = step.objects.size() + step.unsaved_inputs.size();
    if (object < count) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("segment ", index, " needs object ", object, ", but there are ", count,
                     " with the unsaved inputs: add the object, or take the input away"));
  }
  return absl::OkStatus();
}

}  // namespace

bool IsInside(absl::Span<const StepSegment> segments, uint32_t inner, uint32_t outer) {
  while (segments[inner].outer.has_value()) {
    inner = *segments[inner].outer;
    if (inner == outer) return true;
  }
  return false;
}

std::vector<bool> KeptWhole(absl::Span<const StepSegment> segments) {
  std::vector<bool> kept(segments.size(), true);
  for (size_t i = segments.size(); i-- > 0;) {
    const StepSegment& segment = segments[i];
    if (segment.is_recomputed) kept[i] = false;
    if (!kept[i] && segment.outer.has_value()) kept[*segment.outer] = false;
  }
  return kept;
}

StepTrace StepTrace::WithMore(uint64_t size_bytes) const {
  StepTrace step = *this;
  if (step.records.empty()) step.records = {intervals};
  for (StepInterval& interval : step.intervals) interval.other_bytes += size_bytes;
  for (StepSegment& segment : step.segments) {
    if (segment.before.has_value()) segment.before->other_bytes += size_bytes;
  }
  return step;
}

void StepTrace::TakeMostOf(const StepTrace& before) {
  const auto& others = before.records.empty() ? before.intervals : before.records.front();
  records = {intervals, others};
  for (size_t i = 0; i < std::min(intervals.size(), others.size()); ++i) {
    const uint64_t end_bytes = std::max(intervals[i].other_bytes, others[i].other_bytes);
    const uint64_t peak_bytes =
        std::max(intervals[i].peak_other_bytes(), others[i].peak_other_bytes());
    intervals[i].other_bytes = end_bytes;
    intervals[i].transient_bytes = peak_bytes - std::min(peak_bytes, end_bytes);
    intervals[i].released_bytes = end_bytes - std::min(peak_bytes, end_bytes);
  }
  growths = before.growths;
  growths.resize(accesses.size());
  uint32_t objects_before = 0;  // made by accesses up to this one
  for (size_t i = 0; i < std::min(accesses.size(), others.size() - 1); ++i) {
    objects_before = std::max(objects_before, accesses[i] + 1);
    const bool makes_object = i + 1 < accesses.size() && accesses[i + 1] == objects_before;
    const uint64_t grown_bytes = GrowthBytes(records.front(), i, makes_object);
    // Once more than before, and not only in the first step of a program.
    const bool has_grown = grown_bytes > GrowthBytes(others, i, makes_object);
    LeaveRoom(i, has_grown ? std::max(growths[i], grown_bytes) : growths[i], makes_object);
  }
}

void StepTrace::LeaveRoom(const StepGrowth& growth) {
  if (records.empty()) records = {intervals};
  growths.resize(accesses.size());
  const auto next = accesses.begin() + growth.access + 1;
  const bool makes_object =
      next != accesses.end() && std::find(accesses.begin(), next, *next) == next;
  LeaveRoom(growth.access, std::max(growths[growth.access], growth.size_bytes), makes_object);
}

void StepTrace::LeaveRoom(size_t access, uint64_t growth_bytes, bool makes_object) {
  growths[access] = growth_bytes;
  if (growth_bytes == 0) return;
  StepInterval& interval = intervals[access + 1];
  const uint64_t most_bytes = intervals[access].other_bytes + growth_bytes;
  const uint64_t planned_bytes = interval.peak_other_bytes() + NewBytes(access + 1, makes_object);
  interval.transient_bytes += most_bytes - std::min(most_bytes, planned_bytes);
}

uint64_t StepTrace::NewBytes(size_t access, bool makes_object) const {
  return makes_object && objects[accesses[access]].frees ? objects[accesses[access]].size_bytes : 0;
}

uint64_t StepTrace::GrowthBytes(const std::vector<StepInterval>& record, size_t access,
                                bool makes_object) const {
  const uint64_t most_bytes =
      record[access + 1].peak_other_bytes() + NewBytes(access + 1, makes_object);
  return most_bytes - std::min(most_bytes, record[access].other_bytes);
}

double StepTrace::compute_us() const {
  double total_us = 0;
  for (const StepInterval& interval : intervals) total_us += interval.compute_us;
  return total_us;
}

absl::Status StepTrace::Validate() const {
  for (size_t i = 0; i < objects.size(); ++i) {
    if (const absl::Status checked = CheckObject(i, objects[i]); !checked.ok()) return checked;
  }
  size_t used = 0;  // objects so far
  for (size_t i = 0; i < accesses.size(); ++i) {
    if (accesses[i] >= objects.size()) {
      return absl::InvalidArgumentError(absl::StrCat("access ", i, " is of object ", accesses[i],
                                                     ", but there are ", objects.size(),
                                                     ": add the object, or take the access away"));
    }
    if (accesses[i] > used) {
      return absl::InvalidArgumentError(absl::StrCat(
          "access ", i, " is the first of object ", accesses[i], ", and object ", used,
          " has not been used yet: number objects in the order of their first accesses"));
    }
    if (accesses[i] == used) ++used;
  }
  if (used < objects.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("object ", used, " is never used: leave it out of the record"));
  }
  if (intervals.size() != accesses.size() + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("there are ", intervals.size(), " intervals around ", accesses.size(),
                     " accesses: there has to be one before each access and one after the last"));
  }
  if (!operators.empty() && operators.size() != accesses.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("there are ", operators.size(), " operators for ", accesses.size(),
                     " accesses: give one for each access, or none at all"));
  }
  for (size_t i = 0; i < graph_reads.size(); ++i) {
    const bool ascends = i == 0 || graph_reads[i - 1] < graph_reads[i];
    if (graph_reads[i] < accesses.size() && ascends) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("read ", i, " of a backward that makes a graph is access ", graph_reads[i],
                     ", and the step has ", accesses.size(),
                     " accesses: give such accesses in ascending order"));
  }
  for (size_t i = 0; i < intervals.size(); ++i) {
    if (!IsTime(intervals[i].compute_us)) {
      return absl::InvalidArgumentError(absl::StrCat("interval ", i, " cannot take ",
                                                     intervals[i].compute_us,
                                                     " us: its compute has to be a finite time"));
    }
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    if (const absl::Status checked = CheckSegment(i, segments[i], *this); !checked.ok()) {
      return checked;
    }
  }
  return absl::OkStatus();
}

}  // namespace pinion
