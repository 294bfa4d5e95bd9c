#include "pinion/engine/schedule/cached_plan.h"

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/recompute_plan.h"
#include "pinion/engine/planner/step_plan.h"

namespace pinion {

KnownStep::KnownStep(StepRecord step, StepPlan plan, absl::Status shortfall,
                     std::vector<uint32_t> mix, uint64_t memory_bytes)
    : step_(std::move(step)),
      plan_(std::move(plan)),
      shortfall_(std::move(shortfall)),
      mix_(std::move(mix)),
      memory_bytes_(memory_bytes),
      lives_(LivesOf(step_)),
      operator_ends_(OperatorEnds(step_)),
      company_(step_.objects.size()),
      copy_at_(step_.objects.size(), StepMove::kAtOnce),
      first_drop_(step_.objects.size(), UINT32_MAX),
      comes_back_(step_.uses.size()) {
  for (uint32_t object = 0; object < step_.objects.size(); ++object) {
    by_signature_[step_.objects[object].signature].push_back(object);
    if (step_.objects[object].needed_until > 0) overs_.push_back(object);
  }
  std::stable_sort(overs_.begin(), overs_.end(), [this](uint32_t a, uint32_t b) {
    return step_.objects[a].needed_until < step_.objects[b].needed_until;
  });
  using Times = std::tuple<uint32_t, uint32_t, size_t, size_t>;
  absl::flat_hash_map<Times, uint64_t> companies;
  const auto shared = [&](const StepMove& move) {
    const bool comes_back = move.read_at != StepMove::kNever;
    const size_t over = std::max<size_t>(operator_ends_[lives_[move.object].uses.back()],
                                         step_.objects[move.object].needed_until);
    const Times times = {move.drop_at, move.fetch_at,
                         comes_back ? operator_ends_[move.read_at] : move.read_at, over};
    return companies.try_emplace(times, companies.size() + 1).first->second;
  };
  for (uint32_t move = 0; move < plan_.moves.size(); ++move) {
    const uint32_t object = plan_.moves[move].object;
    const bool is_alone = company_[object] != 0 || step_.objects[object].comes_alone;
    company_[object] = is_alone ? AloneCompany(object) : shared(plan_.moves[move]);
    first_drop_[object] = std::min(first_drop_[object], plan_.moves[move].drop_at);
    drops_.push_back(move);
    if (plan_.moves[move].copy_at != StepMove::kAtOnce) {
      late_copies_.push_back(move);
      copy_at_[object] = plan_.moves[move].copy_at;
    }
    if (plan_.moves[move].read_at != StepMove::kNever)
      comes_back_[plan_.moves[move].read_at] = true;
  }
  std::stable_sort(drops_.begin(), drops_.end(), [this](uint32_t a, uint32_t b) {
    return plan_.moves[a].drop_at < plan_.moves[b].drop_at;
  });
  std::sort(late_copies_.begin(), late_copies_.end(), [this](uint32_t a, uint32_t b) {
    const StepMove& one = plan_.moves[a];
    const StepMove& other = plan_.moves[b];
    return std::tie(one.copy_at, one.drop_at, one.object) <
           std::tie(other.copy_at, other.drop_at, other.object);
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
    most_growth_bytes_ = std::max(most_growth_bytes_, growth_bytes_.back());
  }
}

std::shared_ptr<const KnownStep> KnownStep::WithMixTried() const {
  const auto same = std::make_shared<KnownStep>(*this);
  same->mix_.clear();
  same->mix_was_tried_ = true;
  return same;
}

std::shared_ptr<const KnownStep> KnownStep::WithMixLookedFor() const {
  const auto same = std::make_shared<KnownStep>(*this);
  same->mix_was_looked_for_ = true;
  return same;
}

uint64_t KnownStep::MoreBytes(uint64_t device_bytes) const {
  const StepObject& first = step_.objects[step_.uses.front()];
  // What frees nothing is among the other bytes.
  const uint64_t begin_bytes =
      step_.stretches.front().other_bytes + (first.frees ? first.size_bytes : 0);
  return device_bytes - std::min(device_bytes, begin_bytes);
}

std::string KnownStep::note() const {
  const std::string kind = step_.begins_with_gradients ? "adds to gradients" : "";
  if (shortfall_.ok()) return kind;
  return absl::StrCat(kind, kind.empty() ? "" : "; ", "not run as planned: ", shortfall_.message());
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

size_t KnownStep::Saves(uint32_t object) const {
  const std::vector<size_t>& uses = lives_[object].uses;
  const auto read =
      std::upper_bound(uses.begin() + 1, uses.end(), step_.objects[object].saved_until);
  return static_cast<size_t>(read - uses.begin());
}

std::optional<size_t> KnownStep::NextRead(uint32_t object, size_t now, pinion::Use how) const {
  const std::vector<size_t>& uses = lives_[object].uses;
  const StepObject& one = step_.objects[object];
  const auto next =
      std::upper_bound(uses.begin() + 1, uses.end(), std::max<size_t>(now, one.saved_until));
  if (next == uses.end()) return std::nullopt;
  const bool goes = next + 1 == uses.end() && one.needed_until <= operator_ends_[*next] + 1;
  if (how != pinion::Use::kRead && goes) return std::nullopt;
  const bool makes_graph =
      std::binary_search(step_.graph_reads.begin(), step_.graph_reads.end(), *next);
  if (makes_graph != (how == pinion::Use::kReadIntoGraph)) return std::nullopt;
  return *next;
}

std::optional<size_t> KnownStep::NextUse(uint32_t object, size_t now) const {
  const std::vector<size_t>& uses = lives_[object].uses;
  const auto next = std::upper_bound(uses.begin(), uses.end(), now);
  return next == uses.end() ? std::nullopt : std::optional(*next);
}

bool KnownStep::FreesBehind(uint32_t object, size_t now) const {
  const StepObject& one = step_.objects[object];
  if (!one.frees || one.held_until > now) return false;
  const std::vector<size_t>& uses = lives_[object].uses;
  const auto next = std::upper_bound(uses.begin(), uses.end(), now);
  return next == uses.begin() || operator_ends_[*(next - 1)] < now;
}

bool KnownStep::IsLike(const StepRecord& other) const {
  return step_.uses == other.uses && step_.graph_reads == other.graph_reads &&
         step_.early_segments == other.early_segments &&
         step_.begins_with_gradients == other.begins_with_gradients &&
         std::equal(step_.objects.begin(), step_.objects.end(), other.objects.begin(),
                    other.objects.end(), [](const StepObject& a, const StepObject& b) {
                      return a.signature == b.signature && a.frees == b.frees &&
                             a.needed_until == b.needed_until;
                    });
}

absl::StatusOr<std::shared_ptr<const KnownStep>> PlanKnownStep(
    StepRecord step, std::optional<uint64_t> memory_bytes, double slowdown,
    const LinkCalibration& link, bool mixes, const SetAside& aside, uint64_t margin_bytes) {
  if (!memory_bytes.has_value()) {
    PINION_ASSIGN_OR_RETURN(StepPlan plan, PlanStepWithin(step, slowdown, link));
    return std::make_shared<const KnownStep>(std::move(step), std::move(plan));
  }
  PINION_ASSIGN_OR_RETURN(const uint64_t least_bytes, LeastMemoryBytes(step));
  const uint64_t left_bytes = *memory_bytes - std::min(*memory_bytes, least_bytes);
  const uint64_t aside_bytes = std::clamp(left_bytes, aside.least_bytes, aside.enough_bytes);
  const uint64_t allowed_bytes = *memory_bytes - std::min(*memory_bytes, aside_bytes);
  const uint64_t spare_bytes = allowed_bytes - std::min(allowed_bytes, least_bytes);
  const uint64_t step_bytes = allowed_bytes - std::min(margin_bytes, spare_bytes);
  if (mixes) {
    absl::StatusOr<MixedPlan> mixed = PlanMixedStep(step, step_bytes, link);
    if (mixed.ok()) {
      return std::make_shared<const KnownStep>(std::move(step), std::move(mixed->without),
                                               absl::OkStatus(), std::move(mixed->computed_again),
                                               allowed_bytes);
    }
    if (!absl::IsResourceExhausted(mixed.status())) return mixed.status();
  }
  absl::Status shortfall;
  absl::StatusOr<StepPlan> plan = PlanStep(step, step_bytes, link);
  if (absl::IsResourceExhausted(plan.status())) {
    shortfall = plan.status();
    if (aside_bytes > 0) {
      const uint64_t all_bytes = least_bytes + aside_bytes;
      shortfall = absl::ResourceExhaustedError(absl::StrCat(
          shortfall.message(),
          ". Beside it weights that visit, and verify's checksums, take at least ", aside_bytes,
          " bytes (", HumanBytes(aside_bytes), "): the target's least is ", all_bytes, " bytes (",
          HumanBytes(all_bytes), ")"));
    }
    plan = PlanStep(step, least_bytes, link);
  }
  PINION_RETURN_IF_ERROR(plan.status());
  const uint64_t known_bytes = shortfall.ok() ? allowed_bytes : UINT64_MAX;
  return std::make_shared<const KnownStep>(std::move(step), *std::move(plan), std::move(shortfall),
                                           std::vector<uint32_t>(), known_bytes);
}

}  // namespace pinion
