#include "pinion/engine/schedule/recompute_trials.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace pinion {
namespace {

// Sizes of what is saved first outside of those segments, ascending.
std::vector<uint64_t> SizesOutside(const StepRecord& step, const std::vector<bool>& segments) {
  std::vector<bool> is_inside(step.uses.size());
  for (size_t i = 0; i < segments.size(); ++i) {
    if (!segments[i]) continue;
    for (const uint32_t use : step.segments[i].uses) is_inside[use] = true;
  }
  std::vector<uint64_t> sizes;
  std::vector<bool> is_saved(step.objects.size());
  for (size_t use = 0; use < step.uses.size(); ++use) {
    const uint32_t object = step.uses[use];
    if (!is_saved[object] && !is_inside[use]) sizes.push_back(step.objects[object].size_bytes);
    is_saved[object] = true;
  }
  std::sort(sizes.begin(), sizes.end());
  return sizes;
}

// Where the step begins with segments of which one was computed again, it has saved one of that
// one's inputs first.
bool BeginsAlike(const StepRecord& tried, const StepRecord& without) {
  if (tried.early_segments != without.early_segments) return false;
  const auto early_end = tried.segments.begin() + tried.early_segments;
  const auto first = std::find_if(tried.segments.begin(), early_end,
                                  [](const StepSegment& early) { return early.computed_again; });
  if (first == early_end) return true;
  const std::vector<uint32_t>& inputs =
      without.segments[static_cast<size_t>(first - tried.segments.begin())].inputs;
  return std::any_of(inputs.begin(), inputs.end(), [&](uint32_t input) {
    const size_t objects = without.objects.size();
    const uint64_t size_bytes = input < objects
                                    ? without.objects[input].size_bytes
                                    : without.unsaved_inputs[input - objects].size_bytes;
    return size_bytes == tried.objects.front().size_bytes;
  });
}

// Whether `tried`, recorded with segments computed again, is the step that `without` is: what both
// keep, and what both save outside of segments, has the same sizes.
bool IsSameStep(const StepRecord& tried, const StepRecord& without) {
  if (tried.segments.size() != without.segments.size()) return false;
  const std::vector<bool> kept = KeptWhole(tried.segments);
  std::vector<bool> apart = kept;  // of `without`, what is not compared as outside
  for (size_t i = 0; i < kept.size(); ++i) {
    apart[i] = kept[i] || tried.segments[i].computed_again;
    if (!kept[i]) continue;
    const std::vector<uint32_t>& uses = tried.segments[i].uses;
    const std::vector<uint32_t>& same = without.segments[i].uses;
    if (!std::equal(uses.begin(), uses.end(), same.begin(), same.end(),
                    [&](uint32_t a, uint32_t b) {
                      return tried.objects[tried.uses[a]].size_bytes ==
                             without.objects[without.uses[b]].size_bytes;
                    })) {
      return false;
    }
  }
  const std::vector<uint64_t> outside = SizesOutside(tried, kept);  // and inputs
  const std::vector<uint64_t> same = SizesOutside(without, apart);
  return BeginsAlike(tried, without) &&
         std::includes(outside.begin(), outside.end(), same.begin(), same.end());
}

// Behind the last use a program may do what no plan changes, an update for example, and not in each
// step that is otherwise the same.
double UsUntilLastUse(const KnownStep& known) {
  return known.plan().step_us - known.step().stretches.back().compute_us;
}

}  // namespace

std::optional<uint32_t> SegmentChoice::OnEarlySegment(std::shared_ptr<const KnownStep> next,
                                                      bool is_recorded,
                                                      const KnownSteps& known_steps) {
  if (!std::exchange(has_early_, true)) {
    ran_ = {};
    ran_.early_stay = early_stay_;
    const bool is_alike = next != nullptr && next->step().early_segments > 0 && !early_stay_;
    followed_ = is_alike ? next : nullptr;
    if (is_alike && is_recorded && MayTry(*next, known_steps)) Try(std::move(next));
  }
  const auto begun = static_cast<uint32_t>(ran_.computed_again.size());
  const std::optional<uint32_t> ordinal = OnSegment();
  const auto ended = static_cast<uint32_t>(ran_.computed_again.size());
  // With those inside of it that begin as early where all is kept.
  const uint32_t known_early = ordinal.has_value() ? 0 : Known()->step().early_segments;
  ran_.early += std::max(begun + 1, std::min(ended, known_early)) - begun;
  return ordinal;
}

void SegmentChoice::OnBegin(uint64_t signature) {
  signature_ = signature;
  if (std::exchange(has_early_, false)) return;
  ran_ = {};
  followed_ = nullptr;
}

std::shared_ptr<const KnownStep> SegmentChoice::Follow(std::shared_ptr<const KnownStep> known) {
  const std::vector<bool>& again = ran_.computed_again;
  const bool is_mixed = std::find(again.begin(), again.end(), true) != again.end();
  ran_.tried = nullptr;
  std::shared_ptr<const KnownStep> before = std::exchange(followed_, std::move(known));
  // Another known step that has computed the same again was in need of it, too.
  const bool fits = followed_ != nullptr && Fits(*followed_);
  if (!is_mixed || fits) return nullptr;
  unmixed_.insert(signature_);
  const auto early_end = again.begin() + ran_.early;
  early_stay_ = early_stay_ || std::find(again.begin(), early_end, true) != early_end;
  return before;
}

bool SegmentChoice::IsAlone(const StepRecord& step, const KnownSteps& known_steps) const {
  return !unmixed_.contains(step.objects.front().signature) && known_steps.MayMix(step);
}

bool SegmentChoice::MayTry(const KnownStep& known, const KnownSteps& known_steps) const {
  return known_steps.IsOfKind(known) && !known.mix().empty() && IsAlone(known.step(), known_steps);
}

void SegmentChoice::Try(std::shared_ptr<const KnownStep> known) {
  followed_ = nullptr;
  ran_.tried = std::move(known);
}

const KnownStep* SegmentChoice::Known() const {
  return ran_.tried != nullptr ? ran_.tried.get() : followed_.get();
}

std::optional<uint32_t> SegmentChoice::OnSegment() {
  const auto ordinal = static_cast<uint32_t>(ran_.computed_again.size());
  const KnownStep* const known = Known();
  bool again = known != nullptr && known->ComputesAgain(ordinal);
  if (ran_.tried != nullptr) {
    const std::vector<uint32_t>& mix = known->mix();
    again = again || std::binary_search(mix.begin(), mix.end(), ordinal);
  }
  ran_.computed_again.push_back(again);
  if (!again) return ordinal;
  const std::vector<StepSegment>& segments = known->step().segments;
  uint32_t end = ordinal + 1;
  while (end < segments.size() && IsInside(segments, end, ordinal)) ++end;
  ran_.computed_again.resize(end, true);
  for (uint32_t i = ordinal; i < end; ++i) {
    if (segments[i].outer.has_value()) ran_.outers[i] = *segments[i].outer;
  }
  return std::nullopt;
}

bool SegmentChoice::Fits(const KnownStep& known) const {
  if (known.step().early_segments != ran_.early) return false;
  for (size_t ordinal = 0; ordinal < ran_.computed_again.size(); ++ordinal) {
    if (known.ComputesAgain(ordinal) != ran_.computed_again[ordinal]) return false;
  }
  return true;
}

void SegmentChoice::Note(const Ran& ran, StepRecord& step) {
  step.early_segments = ran.early;
  step.segments.resize(std::max(step.segments.size(), ran.computed_again.size()));
  for (size_t ordinal = 0; ordinal < ran.computed_again.size(); ++ordinal) {
    step.segments[ordinal].computed_again = ran.computed_again[ordinal];
    if (ran.early_stay && ordinal < ran.early) step.segments[ordinal].before.reset();
  }
  for (const auto& [ordinal, outer] : ran.outers) step.segments[ordinal].outer = outer;
}

bool SegmentChoice::MayMix(const Ran& ran, const StepRecord& step,
                           const KnownSteps& known_steps) const {
  // The host's times say too little of what a mix is worth.
  if (ran.tried != nullptr || step.timed_by_host || !IsAlone(step, known_steps)) return false;
  const auto before = known_steps.FindLike(step);
  return before != nullptr && !before->mix_was_tried();
}

void SegmentChoice::Learn(const Ran& ran, std::shared_ptr<const KnownStep> known,
                          KnownSteps& known_steps) {
  if (ran.tried == nullptr) {
    const auto before = known_steps.FindLike(known->step());
    if (before != nullptr && before->mix_was_tried()) {
      known = known->WithMixTried();
    } else if (before != nullptr && known->WantsMix() && known_steps.MayMix(known->step())) {
      known = known->WithMixLookedFor();
    }
    return known_steps.Learn(std::move(known));
  }
  // Another step than it began like: it is recorded by itself when it comes once more.
  if (!IsSameStep(known->step(), ran.tried->step()) && ++tries_ < kMaxTries) return;
  tries_ = 0;
  constexpr double kPays = 0.999;
  const bool pays = IsSameStep(known->step(), ran.tried->step()) && known->shortfall().ok() &&
                    UsUntilLastUse(*known) < kPays * UsUntilLastUse(*ran.tried);
  if (pays) known_steps.Forget(*ran.tried);
  // One try is enough for either.
  known_steps.Learn((pays ? *known : *ran.tried).WithMixTried());
}

}  // namespace pinion
