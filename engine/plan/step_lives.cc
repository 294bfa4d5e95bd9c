#include "pinion/engine/plan/step_lives.h"

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
    const bool makes_it =
        life.in_use.empty() && step.objects[index].origin == StepObject::Origin::kDevice;
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

}  // namespace pinion
