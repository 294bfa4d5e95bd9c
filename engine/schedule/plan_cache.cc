#include "pinion/engine/schedule/plan_cache.h"

#include <algorithm>
#include <utility>

namespace pinion {

void KnownSteps::Learn(std::shared_ptr<const KnownStep> known) {
  if (const auto before = FindLike(known->step())) std::erase(all_, before);
  all_.push_front(std::move(known));
  if (all_.size() > kMax) all_.pop_back();
  ForgetOrder();
}

std::shared_ptr<const KnownStep> KnownSteps::FindLike(const StepRecord& step) const {
  const auto like = std::find_if(all_.begin(), all_.end(),
                                 [&](const auto& other) { return other->IsLike(step); });
  return like == all_.end() ? nullptr : *like;
}

std::shared_ptr<const KnownStep> KnownSteps::Likeliest() const {
  const auto fits = std::find_if(all_.begin(), all_.end(), [this](const auto& known) {
    return known->shortfall().ok() && MayBe(*known);
  });
  return fits == all_.end() ? nullptr : *fits;
}

bool KnownSteps::MayMix(const StepRecord& step) const {
  return std::none_of(all_.begin(), all_.end(), [&](const auto& other) {
    return other->step().objects.front().signature == step.objects.front().signature &&
           other->step().begins_with_gradients == step.begins_with_gradients &&
           !other->IsLike(step);
  });
}

bool KnownSteps::MayBe(const KnownStep& known) const {
  if (IsOfKind(known) || !begins_with_gradients_) return IsOfKind(known);
  return std::none_of(all_.begin(), all_.end(), [this](const auto& one) { return IsOfKind(*one); });
}

bool KnownSteps::AnyWantsMix() const {
  return std::any_of(all_.begin(), all_.end(), [this](const auto& known) {
    return known->WantsMix() && MayBe(*known) && MayMix(known->step());
  });
}

void KnownSteps::Forget(const KnownStep& known) {
  std::erase_if(all_, [&](const auto& other) { return other.get() == &known; });
  ForgetOrder();
}

void KnownSteps::ForgetOrder() {
  after_.clear();
  last_ = nullptr;
}

void KnownSteps::OnBegin() {
  const auto next = after_.find(last_);
  if (next == after_.end()) return;
  const auto likely = std::find_if(all_.begin(), all_.end(),
                                   [&](const auto& known) { return known.get() == next->second; });
  if (likely != all_.end()) all_.splice(all_.begin(), all_, likely);
}

void KnownSteps::OnEnd(const KnownStep* ran) {
  after_[last_] = ran;
  last_ = ran;
}

std::shared_ptr<const KnownStep> KnownSteps::Find(absl::FunctionRef<bool(const KnownStep&)> fits) {
  const auto found = std::find_if(all_.begin(), all_.end(),
                                  [&](const auto& known) { return MayBe(*known) && fits(*known); });
  if (found == all_.end()) return nullptr;
  all_.splice(all_.begin(), all_, found);
  return all_.front();
}

}  // namespace pinion
