#include "pinion/engine/planner/liveness.h"

#include <algorithm>
#include <cstdint>

namespace pinion {

std::vector<ObjectLiveness> LivenessOf(const StepTrace& step) {
  std::vector<ObjectLiveness> lives(step.objects.size());
  for (size_t access = 0; access < step.accesses.size(); ++access) {
    const uint32_t object = step.accesses[access];
    ObjectLiveness& life = lives[object];
    if (life.accesses.empty() || access <= step.objects[object].saved_until) ++life.saves;
    life.accesses.push_back(access);
  }
  return lives;
}

std::vector<size_t> EarliestOffloads(const StepTrace& step) {
  std::vector<size_t> from(step.objects.size(), step.accesses.size());
  std::vector<size_t> saved_by(step.objects.size());  // the operator that did last
  std::vector<uint32_t> waiting;
  size_t made = 0;  // objects so far
  for (size_t access = 0; access < step.accesses.size(); ++access) {
    const uint32_t object = step.accesses[access];
    const size_t by = step.operators.empty() ? access : step.operators[access];
    const bool makes = object == made;
    if (makes) waiting.push_back(static_cast<uint32_t>(made++));
    if (makes || access <= step.objects[object].saved_until) saved_by[object] = by;
    std::erase_if(waiting, [&](uint32_t earlier) {
      if (saved_by[earlier] == by) return false;
      from[earlier] = access;
      return true;
    });
  }
  return from;
}

std::vector<size_t> OperatorEnds(const StepTrace& step) {
  std::vector<size_t> ends(step.accesses.size());
  for (size_t access = step.accesses.size(); access-- > 0;) {
    const bool goes_on = !step.operators.empty() && access + 1 < step.accesses.size() &&
                         step.operators[access] == step.operators[access + 1];
    ends[access] = goes_on ? ends[access + 1] : access;
  }
  return ends;
}

size_t LastIntervalOf(const StepObject& object, const ObjectLiveness& life,
                      const std::vector<size_t>& operator_ends) {
  const size_t end = operator_ends.size();
  const bool to_the_end = !life.is_read() && object.needed_until == 0;
  const size_t needed_until = to_the_end ? end : std::min<size_t>(object.needed_until, end);
  return std::max({life.made(), operator_ends[life.accesses.back()] + 1, needed_until});
}

std::vector<int64_t> DeviceBytes(const StepTrace& step, absl::Span<const StepMove> moves) {
  const std::vector<ObjectLiveness> lives = LivenessOf(step);
  const std::vector<size_t> operator_ends = OperatorEnds(step);
  std::vector<int64_t> changes(step.intervals.size() + 1);
  const auto add = [&changes](size_t first, size_t last, int64_t amount) {
    if (first > last) return;
    changes[first] += amount;
    changes[last + 1] -= amount;
  };
  std::vector<size_t> last(step.objects.size());
  for (size_t i = 0; i < step.objects.size(); ++i) {
    const StepObject& object = step.objects[i];
    last[i] = LastIntervalOf(object, lives[i], operator_ends);
    // Memory that evicting does not free is among the other bytes.
    if (object.frees) add(lives[i].made(), last[i], static_cast<int64_t>(object.size_bytes));
  }
  for (const StepMove& move : moves) {
    const auto size_bytes = static_cast<int64_t>(step.objects[move.object].size_bytes);
    add(move.evict_at + 1, std::min<size_t>(move.fetch_at, last[move.object]), -size_bytes);
  }
  std::vector<int64_t> bytes;
  int64_t object_bytes = 0;
  for (size_t i = 0; i < step.intervals.size(); ++i) {
    object_bytes += changes[i];
    bytes.push_back(object_bytes + static_cast<int64_t>(step.intervals[i].peak_other_bytes()));
  }
  return bytes;
}

}  // namespace pinion
