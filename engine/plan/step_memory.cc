#include "pinion/engine/plan/step_memory.h"

#include <algorithm>

namespace pinion {

size_t LastStretchOf(const StepObject& object, const ObjectLife& life,
                     const std::vector<size_t>& operator_ends) {
  const size_t end = operator_ends.size();
  const bool to_the_end = !life.is_read && object.needed_until == 0;
  const size_t needed_until = to_the_end ? end : std::min<size_t>(object.needed_until, end);
  return std::max({life.made, operator_ends[life.uses.back()] + 1, needed_until});
}

std::vector<int64_t> DeviceBytes(const StepRecord& step, absl::Span<const StepMove> moves) {
  const std::vector<ObjectLife> lives = LivesOf(step);
  const std::vector<size_t> operator_ends = OperatorEnds(step);
  std::vector<int64_t> changes(step.stretches.size() + 1);
  const auto add = [&changes](size_t first, size_t last, int64_t amount) {
    if (first > last) return;
    changes[first] += amount;
    changes[last + 1] -= amount;
  };
  std::vector<size_t> last(step.objects.size());
  for (size_t i = 0; i < step.objects.size(); ++i) {
    const StepObject& object = step.objects[i];
    last[i] = LastStretchOf(object, lives[i], operator_ends);
    // What dropping does not free is among the other bytes.
    if (object.frees) add(lives[i].made, last[i], static_cast<int64_t>(object.size_bytes));
  }
  for (const StepMove& move : moves) {
    const auto size_bytes = static_cast<int64_t>(step.objects[move.object].size_bytes);
    add(move.drop_at + 1, std::min<size_t>(move.fetch_at, last[move.object]), -size_bytes);
  }
  std::vector<int64_t> bytes;
  int64_t object_bytes = 0;
  for (size_t i = 0; i < step.stretches.size(); ++i) {
    object_bytes += changes[i];
    bytes.push_back(object_bytes + static_cast<int64_t>(step.stretches[i].peak_other_bytes()));
  }
  return bytes;
}

}  // namespace pinion
