#include "pinion/hooks/weights/target_window.h"

#include <algorithm>

namespace pinion {

uint64_t TargetWindow::AtUse(const VisitUse& use, const AllocatorBytes& allocator) {
  // A peak from before the first use does not count: the whole model may have been resident.
  const int64_t before_bytes = std::exchange(peak_bytes_, allocator.peak);
  const auto peak_bytes = static_cast<uint64_t>(allocator.peak);
  if (last_unit_.has_value() && allocator.peak > before_bytes && peak_bytes > target_bytes_) {
    const uint64_t most_bytes = std::max(excess_.device_bytes, peak_bytes);
    excess_ = {most_bytes, target_bytes_, *last_unit_};
  }
  last_unit_ = use.object;
  // Weights that are about to be allocated count already, and may exceed the allocator's bytes.
  const auto others = [](int64_t all, uint64_t weights) {
    return static_cast<uint64_t>(std::max<int64_t>(0, all - static_cast<int64_t>(weights)));
  };
  const uint64_t own_bytes = weights_->current_bytes;
  std::optional<StepPromise> promise = share_->promise();
  if (promise.has_value()) {
    // Adds other models' weights. Another thread may free some between the two reads.
    promise->most_bytes += std::max(share_->visiting_bytes(), own_bytes) - own_bytes;
  }
  return room_.AtUse(use,
                     {.current = others(allocator.current, own_bytes),
                      .allocated = others(allocator.allocated, weights_->allocated_bytes)},
                     promise);
}

std::optional<TargetWindow::Excess> TargetWindow::TakeFirstExcess() {
  if (excess_.device_bytes == 0 || std::exchange(is_told_, true)) return std::nullopt;
  return excess_;
}

}  // namespace pinion
