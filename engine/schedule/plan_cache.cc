#include "pinion/engine/schedule/plan_cache.h"

#include <algorithm>
#include <utility>

namespace pinion {

void PlanCache::Learn(std::shared_ptr<const CachedPlan> cached) {
  if (const auto before = FindLike(cached->step())) std::erase(all_, before);
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
