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

// By access, and for the end: the bytes of the object that it makes. Memory that eviction does not
// free is among the other bytes.
std::vector<uint64_t> MadeBytes(const StepTrace& step) {
  std::vector<uint64_t> made_bytes(step.accesses.size() + 1);
  size_t made = 0;  // objects are numbered in the order of their first accesses
  for (size_t i = 0; i < step.accesses.size(); ++i) {
    if (step.accesses[i] < made) continue;
    const StepObject& object = step.objects[step.accesses[i]];
    made_bytes[i] = object.frees ? object.size_bytes : 0;
    ++made;
  }
  return made_bytes;
}

// Raises intervals that have less than the step's growths.
void RaiseByGrowths(StepTrace& step) {
  const std::vector<uint64_t> made_bytes = MadeBytes(step);
  for (size_t i = 0; i < step.growths.size(); ++i) {
    if (step.growths[i] == 0) continue;
    StepInterval& next = step.intervals[i + 1];
    const uint64_t most_bytes = step.intervals[i].other_bytes + step.growths[i];
    next.transient_bytes +=
        most_bytes - std::min(most_bytes, next.peak_other_bytes() + made_bytes[i + 1]);
  }
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
  const std::vector<uint64_t> now = GrowthsOf(records[0]);
  const std::vector<uint64_t> earlier = GrowthsOf(records[1]);
  growths = before.growths;
  growths.resize(accesses.size());
  for (size_t i = 0; i < std::min(now.size(), earlier.size()); ++i) {
    // Not what only a program's first step needs.
    if (now[i] > earlier[i]) growths[i] = std::max(growths[i], now[i]);
  }
  RaiseByGrowths(*this);
}

void StepTrace::LeaveRoom(const StepGrowth& growth) {
  if (records.empty()) records = {intervals};
  growths.resize(accesses.size());
  growths[growth.access] = std::max(growths[growth.access], growth.size_bytes);
  RaiseByGrowths(*this);
}

std::vector<uint64_t> StepTrace::GrowthsOf(const std::vector<StepInterval>& record) const {
  std::vector<uint64_t> all;
  const std::vector<uint64_t> made_bytes = MadeBytes(*this);
  for (size_t i = 0; i + 1 < std::min(record.size(), made_bytes.size()); ++i) {
    const uint64_t most_bytes = record[i + 1].peak_other_bytes() + made_bytes[i + 1];
    all.push_back(most_bytes - std::min(most_bytes, record[i].other_bytes));
  }
  return all;
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
