#include "pinion/engine/planner/liveness.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

namespace pinion {
namespace {

// It is in use from where it is made to stretch `until`.
void AddHeld(size_t until, ObjectLife& life) {
  if (until <= life.made) return;
  std::vector<size_t> in_use(until - life.made + 1);
  std::iota(in_use.begin(), in_use.end(), life.made);
  const auto later = std::upper_bound(life.in_use.begin(), life.in_use.end(), until);
  in_use.insert(in_use.end(), later, life.in_use.end());
  life.in_use = std::move(in_use);
}

}  // namespace

std::vector<ObjectLife> LivesOf(const StepRecord& step) {
  std::vector<ObjectLife> lives(step.objects.size());
  for (size_t use = 0; use < step.uses.size(); ++use) {
    const uint32_t index = step.uses[use];
    ObjectLife& life = lives[index];
    const bool makes_it = life.in_use.empty();
    const size_t stretch = makes_it ? use : use + 1;
    if (life.in_use.empty()) life.made = stretch;
    if (!life.in_use.empty() && use <= step.objects[index].saved_until) {
      for (size_t held = life.in_use.back() + 1; held < stretch; ++held) {
        life.in_use.push_back(held);
      }
    }
    life.in_use.push_back(stretch);
    life.uses.push_back(use);
    life.is_read = life.is_read || !makes_it;
    life.over = stretch;
  }
  for (size_t index = 0; index < lives.size(); ++index) {
    ObjectLife& life = lives[index];
    if (!life.is_read) life.over = step.uses.size();  // nobody says that it is not needed any more
    AddHeld(std::min<size_t>(step.objects[index].held_until, life.over), life);
  }
  return lives;
}

std::vector<size_t> LeavesFrom(const StepRecord& step) {
  std::vector<size_t> from(step.objects.size(), step.uses.size());
  std::vector<size_t> saved_by(step.objects.size());  // the operator that did last
  std::vector<uint32_t> waiting;
  size_t made = 0;  // objects so far
  for (size_t use = 0; use < step.uses.size(); ++use) {
    const uint32_t object = step.uses[use];
    const size_t by = step.operators.empty() ? use : step.operators[use];
    const bool makes = object == made;
    if (makes) waiting.push_back(static_cast<uint32_t>(made++));
    if (makes || use <= step.objects[object].saved_until) saved_by[object] = by;
    std::erase_if(waiting, [&](uint32_t earlier) {
      if (saved_by[earlier] == by) return false;
      from[earlier] = use;
      return true;
    });
  }
  return from;
}

std::vector<size_t> OperatorEnds(const StepRecord& step) {
  std::vector<size_t> ends(step.uses.size());
  for (size_t use = step.uses.size(); use-- > 0;) {
    const bool goes_on = !step.operators.empty() && use + 1 < step.uses.size() &&
                         step.operators[use] == step.operators[use + 1];
    ends[use] = goes_on ? ends[use + 1] : use;
  }
  return ends;
}

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
