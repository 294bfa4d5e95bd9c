#include "pinion/engine/schedule/plan_cache.h"

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

CachedPlan::CachedPlan(StepTrace step, StepPlan plan, absl::Status shortfall,
                       std::vector<uint32_t> recompute_set, uint64_t memory_bytes)
    : step_(std::move(step)),
      plan_(std::move(plan)),
      shortfall_(std::move(shortfall)),
      recompute_set_(std::move(recompute_set)),
      memory_bytes_(memory_bytes),
      lives_(LivenessOf(step_)),
      operator_ends_(OperatorEnds(step_)),
      batch_key_(step_.objects.size()),
      copy_at_(step_.objects.size(), StepMove::kAtOnce),
      first_eviction_(step_.objects.size(), UINT32_MAX),
      comes_back_(step_.accesses.size()) {
  for (uint32_t object = 0; object < step_.objects.size(); ++object) {
    by_signature_[step_.objects[object].signature].push_back(object);
    if (step_.objects[object].needed_until > 0) overs_.push_back(object);
  }
  std::stable_sort(overs_.begin(), overs_.end(), [this](uint32_t a, uint32_t b) {
    return step_.objects[a].needed_until < step_.objects[b].needed_until;
  });
  using Times = std::tuple<uint32_t, uint32_t, size_t, size_t>;
  absl::flat_hash_map<Times, uint64_t> batch_keys;
  const auto shared = [&](const StepMove& move) {
    const bool comes_back = move.read_at != StepMove::kNever;
    const size_t over = std::max<size_t>(operator_ends_[lives_[move.object].accesses.back()],
                                         step_.objects[move.object].needed_until);
    const Times times = {move.evict_at, move.fetch_at,
                         comes_back ? operator_ends_[move.read_at] : move.read_at, over};
    return batch_keys.try_emplace(times, batch_keys.size() + 1).first->second;
  };
  for (uint32_t move = 0; move < plan_.moves.size(); ++move) {
    const uint32_t object = plan_.moves[move].object;
    const bool is_alone = batch_key_[object] != 0 || step_.objects[object].comes_alone;
    batch_key_[object] = is_alone ? UniqueBatchKey(object) : shared(plan_.moves[move]);
    first_eviction_[object] = std::min(first_eviction_[object], plan_.moves[move].evict_at);
    evictions_.push_back(move);
    if (plan_.moves[move].copy_at != StepMove::kAtOnce) {
      deferred_copies_.push_back(move);
      copy_at_[object] = plan_.moves[move].copy_at;
    }
    if (plan_.moves[move].read_at != StepMove::kNever)
      comes_back_[plan_.moves[move].read_at] = true;
  }
  std::stable_sort(evictions_.begin(), evictions_.end(), [this](uint32_t a, uint32_t b) {
    return plan_.moves[a].evict_at < plan_.moves[b].evict_at;
  });
  std::sort(deferred_copies_.begin(), deferred_copies_.end(), [this](uint32_t a, uint32_t b) {
    const StepMove& one = plan_.moves[a];
    const StepMove& other = plan_.moves[b];
    return std::tie(one.copy_at, one.evict_at, one.object) <
           std::tie(other.copy_at, other.evict_at, other.object);
  });
  growth_bytes_ = step_.growths;
  growth_bytes_.resize(step_.accesses.size());
  const auto count = [this](const std::vector<StepInterval>& record) {
    const std::vector<uint64_t> growths = step_.GrowthsOf(record);
    for (size_t access = 0; access < growths.size(); ++access) {
      growth_bytes_[access] = std::max(growth_bytes_[access], growths[access]);
    }
  };
  count(step_.intervals);
  for (const std::vector<StepInterval>& record : step_.records) count(record);
  SumUpGrowths();
}

void CachedPlan::SumUpGrowths() {
  save_growth_bytes_.clear();
  most_growth_bytes_ = 0;
  bool is_save = true;
  for (size_t access = 0; access < growth_bytes_.size(); ++access) {
    most_growth_bytes_ = std::max(most_growth_bytes_, growth_bytes_[access]);
    is_save = is_save && access <= lives_[step_.accesses[access]].last_save();
    if (is_save) save_growth_bytes_.push_back(most_growth_bytes_);
  }
}

std::shared_ptr<const CachedPlan> CachedPlan::WithRecomputeTried() const {
  const auto same = std::make_shared<CachedPlan>(*this);
  same->recompute_set_.clear();
  same->recompute_was_tried_ = true;
  return same;
}

std::shared_ptr<const CachedPlan> CachedPlan::WithRecomputeSearched() const {
  const auto same = std::make_shared<CachedPlan>(*this);
  same->recompute_was_searched_ = true;
  return same;
}

std::shared_ptr<const CachedPlan> CachedPlan::WithGrowths(
    absl::Span<const StepGrowth> growths) const {
  const auto same = std::make_shared<CachedPlan>(*this);
  for (const StepGrowth& growth : growths) {
    uint64_t& most_bytes = same->growth_bytes_[growth.access];
    most_bytes = std::max(most_bytes, growth.size_bytes);
    uint64_t& seen_bytes = same->seen_growths_[growth.access];
    seen_bytes = std::max(seen_bytes, growth.size_bytes);
  }
  same->SumUpGrowths();
  return same;
}

std::vector<StepGrowth> CachedPlan::SeenGrowths() const {
  std::vector<StepGrowth> growths;
  for (const auto& [access, size_bytes] : seen_growths_) growths.push_back({access, size_bytes});
  return growths;
}

uint64_t CachedPlan::begin_bytes() const {
  const StepObject& first = step_.objects[step_.accesses.front()];
  // Memory that eviction does not free is among the other bytes.
  return step_.intervals.front().other_bytes + (first.frees ? first.size_bytes : 0);
}

uint64_t CachedPlan::ExcessBytes(uint64_t device_bytes) const {
  return device_bytes - std::min(device_bytes, begin_bytes());
}

bool CachedPlan::FitsWith(uint64_t device_bytes) const {
  return memory_bytes_ == UINT64_MAX ||
         plan_.peak_bytes + device_bytes <= memory_bytes_ + begin_bytes();
}

std::string CachedPlan::note() const {
  const std::string kind = step_.begins_with_gradients ? "adds to gradients" : "";
  if (shortfall_.ok()) return kind;
  return absl::StrCat(kind, kind.empty() ? "" : "; ", "not run as planned: ", shortfall_.message());
}

std::optional<uint32_t> CachedPlan::Find(uint64_t signature, size_t before) const {
  const auto found = by_signature_.find(signature);
  if (found == by_signature_.end() || before >= found->second.size()) return std::nullopt;
  return found->second[before];
}

size_t CachedPlan::AccessIndex(uint32_t object, size_t n) const {
  const std::vector<size_t>& accesses = lives_[object].accesses;
  return accesses[std::min(n, accesses.size() - 1)];
}

std::optional<size_t> CachedPlan::NextRead(uint32_t object, size_t now, AccessKind how) const {
  const std::vector<size_t>& accesses = lives_[object].accesses;
  const StepObject& one = step_.objects[object];
  const auto first_read = accesses.begin() + static_cast<ptrdiff_t>(Saves(object));
  const auto next = std::upper_bound(first_read, accesses.end(), now);
  if (next == accesses.end()) return std::nullopt;
  const bool goes = next + 1 == accesses.end() && one.needed_until <= operator_ends_[*next] + 1;
  if (how != AccessKind::kRead && goes) return std::nullopt;
  const bool makes_graph =
      std::binary_search(step_.graph_reads.begin(), step_.graph_reads.end(), *next);
  if (makes_graph != (how == AccessKind::kReadIntoGraph)) return std::nullopt;
  return *next;
}

std::optional<size_t> CachedPlan::NextAccess(uint32_t object, size_t now) const {
  const std::vector<size_t>& accesses = lives_[object].accesses;
  const auto next = std::upper_bound(accesses.begin(), accesses.end(), now);
  return next == accesses.end() ? std::nullopt : std::optional(*next);
}

bool CachedPlan::FreesBehind(uint32_t object, size_t now) const {
  const StepObject& one = step_.objects[object];
  if (!one.frees || one.held_until > now) return false;
  const std::vector<size_t>& accesses = lives_[object].accesses;
  const auto next = std::upper_bound(accesses.begin(), accesses.end(), now);
  return next == accesses.begin() || operator_ends_[*(next - 1)] < now;
}

bool CachedPlan::IsLike(const StepTrace& other) const {
  return step_.accesses == other.accesses && step_.graph_reads == other.graph_reads &&
         step_.early_segments == other.early_segments &&
         step_.begins_with_gradients == other.begins_with_gradients &&
         std::equal(step_.objects.begin(), step_.objects.end(), other.objects.begin(),
                    other.objects.end(), [](const StepObject& a, const StepObject& b) {
                      return a.signature == b.signature && a.frees == b.frees &&
                             a.needed_until == b.needed_until;
                    });
}

size_t CachedPlan::AccessesAlike(const CachedPlan& other) const {
  const size_t most = std::min(step_.accesses.size(), other.step_.accesses.size());
  size_t alike = 0;
  for (; alike < most; ++alike) {
    const uint32_t one = step_.accesses[alike];
    const uint32_t another = other.step_.accesses[alike];
    if (one != another) break;
    if (step_.objects[one].signature != other.step_.objects[another].signature) break;
  }
  return alike;
}

absl::StatusOr<std::shared_ptr<const CachedPlan>> MakeCachedPlan(
    StepTrace step, std::optional<uint64_t> memory_bytes, const LinkCalibration& link,
    bool may_recompute, const Reservation& reservation, uint64_t margin_bytes) {
  if (!memory_bytes.has_value()) {
    PINION_ASSIGN_OR_RETURN(StepPlan plan, PlanStepWithoutTarget(step, link));
    return std::make_shared<const CachedPlan>(std::move(step), std::move(plan));
  }
  PINION_ASSIGN_OR_RETURN(const uint64_t least_bytes, LeastMemoryBytes(step));
  const uint64_t left_bytes = *memory_bytes - std::min(*memory_bytes, least_bytes);
  const uint64_t reserved_bytes =
      std::clamp(left_bytes, reservation.least_bytes, reservation.enough_bytes);
  const uint64_t allowed_bytes = *memory_bytes - std::min(*memory_bytes, reserved_bytes);
  const uint64_t spare_bytes = allowed_bytes - std::min(allowed_bytes, least_bytes);
  const uint64_t step_bytes = allowed_bytes - std::min(margin_bytes, spare_bytes);
  if (may_recompute) {
    absl::StatusOr<RecomputePlan> recompute = PlanWithRecomputation(step, step_bytes, link);
    if (recompute.ok()) {
      return std::make_shared<const CachedPlan>(std::move(step), std::move(recompute->without),
                                                absl::OkStatus(), std::move(recompute->segments),
                                                allowed_bytes);
    }
    if (!absl::IsResourceExhausted(recompute.status())) return recompute.status();
  }
  absl::Status shortfall;
  absl::StatusOr<StepPlan> plan = PlanStep(step, step_bytes, link);
  if (absl::IsResourceExhausted(plan.status())) {
    shortfall = plan.status();
    if (reserved_bytes > 0) {
      const uint64_t all_bytes = least_bytes + reserved_bytes;
      shortfall = absl::ResourceExhaustedError(absl::StrCat(
          shortfall.message(),
          ". Beside it streamed weights, and verify's checksums, take at least ", reserved_bytes,
          " bytes (", HumanBytes(reserved_bytes), "): the target's least is ", all_bytes,
          " bytes (", HumanBytes(all_bytes), ")"));
    }
    plan = PlanStep(step, least_bytes, link);
  }
  PINION_RETURN_IF_ERROR(plan.status());
  return std::make_shared<const CachedPlan>(std::move(step), *std::move(plan), std::move(shortfall),
                                            std::vector<uint32_t>(), allowed_bytes);
}

void PlanCache::Learn(std::shared_ptr<const CachedPlan> cached) {
  if (const auto before = FindLike(cached->step())) {
    const bool falls_short = before->shortfall().ok() && !cached->shortfall().ok();
    if (falls_short && !before->FitsWith(cached->begin_bytes())) return;
    std::erase(all_, before);
    const std::vector<StepGrowth> seen = before->SeenGrowths();
    if (!seen.empty()) cached = cached->WithGrowths(seen);
  }
  all_.push_front(std::move(cached));
  if (all_.size() > kMax) all_.pop_back();
  ForgetOrder();
}

std::shared_ptr<const CachedPlan> PlanCache::FindLike(const StepTrace& step) const {
  const auto like = std::find_if(all_.begin(), all_.end(),
                                 [&](const auto& other) { return other->IsLike(step); });
  return like == all_.end() ? nullptr : *like;
}

std::shared_ptr<const CachedPlan> PlanCache::Likeliest() const {
  const auto fits = std::find_if(all_.begin(), all_.end(), [this](const auto& cached) {
    return cached->shortfall().ok() && MayBe(*cached);
  });
  return fits == all_.end() ? nullptr : *fits;
}

bool PlanCache::MayRecompute(const StepTrace& step) const {
  return std::none_of(all_.begin(), all_.end(), [&](const auto& other) {
    return other->step().objects.front().signature == step.objects.front().signature &&
           other->step().begins_with_gradients == step.begins_with_gradients &&
           !other->IsLike(step);
  });
}

bool PlanCache::MayBe(const CachedPlan& cached) const {
  if (IsOfKind(cached) || !begins_with_gradients_) return IsOfKind(cached);
  return std::none_of(all_.begin(), all_.end(), [this](const auto& one) { return IsOfKind(*one); });
}

bool PlanCache::AnyWantsRecomputeTrial() const {
  return std::any_of(all_.begin(), all_.end(), [this](const auto& cached) {
    return cached->WantsRecomputeTrial() && MayBe(*cached) && MayRecompute(cached->step());
  });
}

void PlanCache::Forget(const CachedPlan& cached) {
  std::erase_if(all_, [&](const auto& other) { return other.get() == &cached; });
  ForgetOrder();
}

void PlanCache::ForgetOrder() {
  after_.clear();
  last_ = nullptr;
}

void PlanCache::OnBegin() {
  const auto next = after_.find(last_);
  if (next == after_.end()) return;
  const auto likely = std::find_if(
      all_.begin(), all_.end(), [&](const auto& cached) { return cached.get() == next->second; });
  if (likely != all_.end()) all_.splice(all_.begin(), all_, likely);
}

void PlanCache::OnEnd(const CachedPlan* ran) {
  after_[last_] = ran;
  last_ = ran;
}

std::shared_ptr<const CachedPlan> PlanCache::Find(absl::FunctionRef<bool(const CachedPlan&)> fits) {
  const auto found = std::find_if(all_.begin(), all_.end(), [&](const auto& cached) {
    return MayBe(*cached) && fits(*cached);
  });
  if (found == all_.end()) return nullptr;
  all_.splice(all_.begin(), all_, found);
  return all_.front();
}

}  // namespace pinion
