#include "pinion/engine/plan/known_step.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace pinion {

KnownStep::KnownStep(StepRecord step, StepPlan plan, absl::Status shortfall)
    : step_(std::move(step)),
      plan_(std::move(plan)),
      shortfall_(std::move(shortfall)),
      lives_(LivesOf(step_)),
      company_(step_.objects.size()) {
  for (uint32_t object = 0; object < step_.objects.size(); ++object) {
    by_signature_[step_.objects[object].signature].push_back(object);
  }
  const std::vector<size_t> operator_ends = OperatorEnds(step_);
  using Times = std::tuple<uint32_t, uint32_t, size_t, size_t>;
  absl::flat_hash_map<Times, uint64_t> companies;
  const auto shared = [&](const StepMove& move) {
    const bool comes_back = move.read_at != StepMove::kNever;
    const size_t over = std::max<size_t>(operator_ends[lives_[move.object].uses.back()],
                                         step_.objects[move.object].needed_until);
    const Times times = {move.drop_at, move.fetch_at,
                         comes_back ? operator_ends[move.read_at] : move.read_at, over};
    return companies.try_emplace(times, companies.size() + 1).first->second;
  };
  for (uint32_t move = 0; move < plan_.moves.size(); ++move) {
    const uint32_t object = plan_.moves[move].object;
    company_[object] = company_[object] == 0 ? shared(plan_.moves[move]) : AloneCompany(object);
    drops_.push_back(move);
  }
  std::stable_sort(drops_.begin(), drops_.end(), [this](uint32_t a, uint32_t b) {
    return plan_.moves[a].drop_at < plan_.moves[b].drop_at;
  });
  for (size_t use = 0; use < step_.uses.size(); ++use) {
    const StepStretch& before = step_.stretches[use];
    const StepStretch& behind = step_.stretches[use + 1];
    uint64_t most_bytes = behind.peak_other_bytes();
    if (use + 1 < step_.uses.size()) {
      const uint32_t next = step_.uses[use + 1];
      const StepObject& object = step_.objects[next];
      // What frees nothing is among the other bytes.
      if (lives_[next].uses.front() == use + 1 && object.frees) most_bytes += object.size_bytes;
    }
    growth_bytes_.push_back(most_bytes - std::min(most_bytes, before.other_bytes));
  }
}

std::optional<uint32_t> KnownStep::Find(uint64_t signature, size_t before) const {
  const auto found = by_signature_.find(signature);
  if (found == by_signature_.end() || before >= found->second.size()) return std::nullopt;
  return found->second[before];
}

size_t KnownStep::Use(uint32_t object, size_t n) const {
  const std::vector<size_t>& uses = lives_[object].uses;
  return uses[std::min(n, uses.size() - 1)];
}

}  // namespace pinion
