#include "pinion/hooks/weights/target_window.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

uint64_t TargetWindow::AtUse(uint32_t unit, uint64_t argument_bytes,
                             const AllocatorBytes& allocator) {
  // Before the first use the device may have had the whole model.
  const int64_t before_bytes = std::exchange(peak_bytes_, allocator.peak);
  const auto peak_bytes = static_cast<uint64_t>(allocator.peak);
  if (last_unit_.has_value() && allocator.peak > before_bytes && peak_bytes > target_bytes_) {
    excess_ = {peak_bytes, target_bytes_, *last_unit_};
  }
  last_unit_ = unit;
  // What weights are about to allocate counts as theirs already.
  const auto others = [](int64_t all, uint64_t weights) {
    return static_cast<uint64_t>(std::max<int64_t>(0, all - static_cast<int64_t>(weights)));
  };
  const uint64_t own_bytes = weights_->current_bytes;
  std::optional<StepPromise> promise = share_->promise();
  if (promise.has_value()) {
    promise->most_bytes += share_->visiting_bytes() - own_bytes;  // other models' weights
  }
  return room_.AtUse({.object = unit,
                      .builds_graph = c10::GradMode::is_enabled(),
                      .in_backward = CurrentBackward() != -1,
                      .argument_bytes = argument_bytes},
                     {.current = others(allocator.current, own_bytes),
                      .allocated = others(allocator.allocated, weights_->allocated_bytes)},
                     promise);
}

std::optional<TargetWindow::Excess> TargetWindow::TakeFirstExcess() {
  if (excess_.device_bytes == 0 || std::exchange(is_told_, true)) return std::nullopt;
  return excess_;
}

}  // namespace pinion
