#include "pinion/engine/plan/segment_choice.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace pinion {

void SegmentChoice::OnBegin() {
  followed_ = nullptr;
  tried_ = nullptr;
  computed_again_.clear();
}

void SegmentChoice::Follow(std::shared_ptr<const KnownStep> known) {
  followed_ = std::move(known);
  tried_ = nullptr;
}

void SegmentChoice::Try(std::shared_ptr<const KnownStep> known) {
  followed_ = nullptr;
  tried_ = std::move(known);
}

std::optional<uint32_t> SegmentChoice::OnSegment() {
  const auto ordinal = static_cast<uint32_t>(computed_again_.size());
  bool again = followed_ != nullptr && followed_->ComputesAgain(ordinal);
  if (tried_ != nullptr) {
    const std::vector<uint32_t>& mix = tried_->mix();
    again = tried_->ComputesAgain(ordinal) || std::binary_search(mix.begin(), mix.end(), ordinal);
  }
  computed_again_.push_back(again);
  if (again) return std::nullopt;
  return ordinal;
}

bool SegmentChoice::Fits(const KnownStep& known) const {
  for (size_t ordinal = 0; ordinal < computed_again_.size(); ++ordinal) {
    if (known.ComputesAgain(ordinal) != computed_again_[ordinal]) return false;
  }
  return true;
}

void SegmentChoice::Note(StepRecord& step) const {
  step.segments.resize(std::max(step.segments.size(), computed_again_.size()));
  for (size_t ordinal = 0; ordinal < computed_again_.size(); ++ordinal) {
    step.segments[ordinal].computed_again = computed_again_[ordinal];
  }
}

void SegmentChoice::Learn(std::shared_ptr<const KnownStep> known, KnownSteps& known_steps) {
  if (const auto without = std::exchange(tried_, nullptr)) {
    constexpr double kWorthIt = 0.999;
    const bool pays =
        known->shortfall().ok() && known->plan().step_us < kWorthIt * without->plan().step_us;
    if (pays) known_steps.Forget(*without);
    // One try is enough for either.
    known = std::make_shared<const KnownStep>((pays ? known : without)->WithoutMix());
  } else if (const auto before = known_steps.FindLike(*known);
             before != nullptr && before->mix().empty() && !known->mix().empty()) {
    // It was tried, and did not pay.
    known = std::make_shared<const KnownStep>(known->WithoutMix());
  }
  known_steps.Learn(std::move(known));
}

}  // namespace pinion
