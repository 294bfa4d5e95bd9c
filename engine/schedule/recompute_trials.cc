#include "pinion/engine/schedule/recompute_trials.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace pinion {
namespace {

// Sizes of objects whose first save is outside of those segments, ascending.
std::vector<uint64_t> SizesOutside(const StepTrace& step, const std::vector<bool>& segments) {
  std::vector<bool> is_inside(step.accesses.size());
  for (size_t i = 0; i < segments.size(); ++i) {
    if (!segments[i]) continue;
    for (const uint32_t access : step.segments[i].accesses) is_inside[access] = true;
  }
  std::vector<uint64_t> sizes;
  std::vector<bool> is_saved(step.objects.size());
  for (size_t access = 0; access < step.accesses.size(); ++access) {
    const uint32_t object = step.accesses[access];
    if (!is_saved[object] && !is_inside[access]) sizes.push_back(step.objects[object].size_bytes);
    is_saved[object] = true;
  }
  std::sort(sizes.begin(), sizes.end());
  return sizes;
}

// If both begin with segments, the first recomputed one saves one of its inputs first.
bool BeginsAlike(const StepTrace& tried, const StepTrace& without) {
  if (tried.early_segments != without.early_segments) return false;
  const auto early_end = tried.segments.begin() + tried.early_segments;
  const auto first = std::find_if(tried.segments.begin(), early_end,
                                  [](const StepSegment& early) { return early.is_recomputed; });
  if (first == early_end) return true;
  const std::vector<uint32_t>& inputs =
      without.segments[static_cast<size_t>(first - tried.segments.begin())].inputs;
  return std::any_of(inputs.begin(), inputs.end(), [&](uint32_t input) {
    return without.ObjectOrInput(input).size_bytes == tried.objects.front().size_bytes;
  });
}

// Whether `tried`, recorded with recomputed segments, is the same step as `without`: the segments
// that both keep, and the saves outside of segments, have the same sizes.
bool IsSameStep(const StepTrace& tried, const StepTrace& without) {
  if (tried.segments.size() != without.segments.size()) return false;
  const std::vector<bool> kept = KeptWhole(tried.segments);
  std::vector<bool> apart = kept;  // of `without`: segments that do not count as outside
  for (size_t i = 0; i < kept.size(); ++i) {
    apart[i] = kept[i] || tried.segments[i].is_recomputed;
    if (!kept[i]) continue;
    const std::vector<uint32_t>& accesses = tried.segments[i].accesses;
    const std::vector<uint32_t>& same = without.segments[i].accesses;
    if (!std::equal(accesses.begin(), accesses.end(), same.begin(), same.end(),
                    [&](uint32_t a, uint32_t b) {
                      return tried.objects[tried.accesses[a]].size_bytes ==
                             without.objects[without.accesses[b]].size_bytes;
                    })) {
      return false;
    }
  }
  const std::vector<uint64_t> outside = SizesOutside(tried, kept);  // and inputs
  const std::vector<uint64_t> same = SizesOutside(without, apart);
  return BeginsAlike(tried, without) &&
         std::includes(outside.begin(), outside.end(), same.begin(), same.end());
}

// After the last access a program may do work that no plan changes, such as an optimizer step, and
// not in each step.
double UsUntilLastAccess(const CachedPlan& cached) {
  return cached.plan().step_us - cached.step().intervals.back().compute_us;
}

}  // namespace

std::optional<uint32_t> RecomputeTrials::OnEarlySegment(std::shared_ptr<const CachedPlan> next,
                                                        bool is_recorded, const PlanCache& cache) {
  if (!std::exchange(has_early_, true)) {
    log_ = {};
    log_.early_stay = early_stay_;
    const bool is_alike = next != nullptr && next->step().early_segments > 0 && !early_stay_;
    followed_ = is_alike ? next : nullptr;
    if (is_alike && is_recorded && MayTry(*next, cache)) Try(std::move(next));
  }
  const auto begun = static_cast<uint32_t>(log_.is_recomputed.size());
  const std::optional<uint32_t> ordinal = OnSegment();
  const auto ended = static_cast<uint32_t>(log_.is_recomputed.size());
  // With the inner ones that begin as early where all is kept.
  const uint32_t known_early = ordinal.has_value() ? 0 : Known()->step().early_segments;
  log_.early += std::max(begun + 1, std::min(ended, known_early)) - begun;
  return ordinal;
}

void RecomputeTrials::OnBegin(uint64_t signature) {
  signature_ = signature;
  if (std::exchange(has_early_, false)) return;
  log_ = {};
  followed_ = nullptr;
}

std::shared_ptr<const CachedPlan> RecomputeTrials::Follow(
    std::shared_ptr<const CachedPlan> cached) {
  const std::vector<bool>& again = log_.is_recomputed;
  const bool recomputes = std::find(again.begin(), again.end(), true) != again.end();
  log_.tried = nullptr;
  std::shared_ptr<const CachedPlan> before = std::exchange(followed_, std::move(cached));
  // The other plan recomputes the same segments, so nothing was wrong.
  const bool fits = followed_ != nullptr && Fits(*followed_);
  if (!recomputes || fits) return nullptr;
  never_recomputed_.insert(signature_);
  const auto early_end = again.begin() + log_.early;
  early_stay_ = early_stay_ || std::find(again.begin(), early_end, true) != early_end;
  return before;
}

bool RecomputeTrials::IsAlone(const StepTrace& step, const PlanCache& cache) const {
  return !never_recomputed_.contains(step.objects.front().signature) && cache.MayRecompute(step);
}

bool RecomputeTrials::MayTry(const CachedPlan& cached, const PlanCache& cache) const {
  return cache.IsOfKind(cached) && !cached.recompute_set().empty() && IsAlone(cached.step(), cache);
}

void RecomputeTrials::Try(std::shared_ptr<const CachedPlan> cached) {
  followed_ = nullptr;
  log_.tried = std::move(cached);
}

const CachedPlan* RecomputeTrials::Known() const {
  return log_.tried != nullptr ? log_.tried.get() : followed_.get();
}

std::optional<uint32_t> RecomputeTrials::OnSegment() {
  const auto ordinal = static_cast<uint32_t>(log_.is_recomputed.size());
  const CachedPlan* const cached = Known();
  bool again = cached != nullptr && cached->Recomputes(ordinal);
  if (log_.tried != nullptr) {
    const std::vector<uint32_t>& recompute_set = cached->recompute_set();
    again = again || std::binary_search(recompute_set.begin(), recompute_set.end(), ordinal);
  }
  log_.is_recomputed.push_back(again);
  if (!again) return ordinal;
  const std::vector<StepSegment>& segments = cached->step().segments;
  uint32_t end = ordinal + 1;
  while (end < segments.size() && IsInside(segments, end, ordinal)) ++end;
  log_.is_recomputed.resize(end, true);
  for (uint32_t i = ordinal; i < end; ++i) {
    if (segments[i].outer.has_value()) log_.outers[i] = *segments[i].outer;
  }
  return std::nullopt;
}

bool RecomputeTrials::Fits(const CachedPlan& cached) const {
  if (cached.step().early_segments != log_.early) return false;
  for (size_t ordinal = 0; ordinal < log_.is_recomputed.size(); ++ordinal) {
    if (cached.Recomputes(ordinal) != log_.is_recomputed[ordinal]) return false;
  }
  return true;
}

void RecomputeTrials::Note(const SegmentLog& log, StepTrace& step) {
  step.early_segments = log.early;
  step.segments.resize(std::max(step.segments.size(), log.is_recomputed.size()));
  for (size_t ordinal = 0; ordinal < log.is_recomputed.size(); ++ordinal) {
    step.segments[ordinal].is_recomputed = log.is_recomputed[ordinal];
    if (log.early_stay && ordinal < log.early) step.segments[ordinal].before.reset();
  }
  for (const auto& [ordinal, outer] : log.outers) step.segments[ordinal].outer = outer;
}

bool RecomputeTrials::MayRecompute(const SegmentLog& log, const StepTrace& step,
                                   const PlanCache& cache) const {
  // Times by the host are too inexact to compare plans.
  if (log.tried != nullptr || step.timed_by_host || !IsAlone(step, cache)) return false;
  const auto before = cache.FindLike(step);
  return before != nullptr && !before->recompute_was_tried();
}

void RecomputeTrials::Learn(const SegmentLog& log, std::shared_ptr<const CachedPlan> cached,
                            PlanCache& cache) {
  if (log.tried == nullptr) {
    const auto before = cache.FindLike(cached->step());
    if (before != nullptr && before->recompute_was_tried()) {
      cached = cached->WithRecomputeTried();
    } else if (before != nullptr && cached->WantsRecomputeTrial() &&
               cache.MayRecompute(cached->step())) {
      cached = cached->WithRecomputeSearched();
    }
    return cache.Learn(std::move(cached));
  }
  // The trial ran another step than intended. That step is recorded by itself when it recurs.
  if (!IsSameStep(cached->step(), log.tried->step()) && ++tries_ < kMaxTries) return;
  tries_ = 0;
  constexpr double kPays = 0.999;
  const bool pays = IsSameStep(cached->step(), log.tried->step()) && cached->shortfall().ok() &&
                    UsUntilLastAccess(*cached) < kPays * UsUntilLastAccess(*log.tried);
  if (pays) cache.Forget(*log.tried);
  // One trial is enough for either plan.
  cache.Learn((pays ? *cached : *log.tried).WithRecomputeTried());
}

}  // namespace pinion
