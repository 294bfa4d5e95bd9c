#include "pinion/engine/schedule/window_predictor.h"

#include <algorithm>

namespace pinion {
namespace {

// Later uses share the last place: a model of a single layer is used without end.
constexpr uint64_t kMostUses = 63;

}  // namespace

WindowPredictor::Place WindowPredictor::PlaceOf(const WeightUse& use) {
  if (std::exchange(in_backward_, use.in_backward) && !use.in_backward) uses_.clear();
  const Place first = {use.object, (use.builds_graph ? 2 : 0) | (use.in_backward ? 1 : 0)};
  uint64_t& uses = uses_[first];
  const bool is_in_row = last_.has_value() && last_->place.first == use.object;
  const bool has_end = use.builds_graph || use.in_backward;
  if (!has_end && !is_in_row) uses = 0;
  return {use.object, first.second | std::min(uses++, kMostUses) << 2};
}

uint64_t WindowPredictor::AtUse(const WeightUse& use, const OthersBytes& others,
                                const std::optional<PeakBound>& peak_bound) {
  const Place place = PlaceOf(use);
  NoteLast(others);
  last_ = {place, use.argument_bytes, others};
  const auto known = known_.find(place);
  if (known == known_.end() || use.argument_bytes > known->second.argument_bytes) return 0;
  uint64_t taken_bytes = others.current + known->second.allocated_bytes;
  if (peak_bound.has_value()) {
    taken_bytes =
        peak_bound->moves ? peak_bound->most_bytes : std::min(taken_bytes, peak_bound->most_bytes);
    taken_bytes = std::max(taken_bytes, others.current);
  }
  return target_bytes_ - std::min(target_bytes_, taken_bytes);
}

void WindowPredictor::NoteLast(const OthersBytes& others) {
  if (!last_.has_value()) return;
  // The allocator's counts were reset: the allocations since the last use are unknown.
  if (others.allocated < last_->others.allocated) {
    known_.erase(last_->place);
    return;
  }
  Known& known = known_[last_->place];
  known.argument_bytes = std::max(known.argument_bytes, last_->argument_bytes);
  known.allocated_bytes =
      std::max(known.allocated_bytes, others.allocated - last_->others.allocated);
}

}  // namespace pinion
