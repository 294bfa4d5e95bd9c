#include "pinion/bench/attribution/attribution_world.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/time_stats.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

// Autograd's workers release the last tensors shortly after the last backward.
constexpr int kLooks = 20;
constexpr absl::Duration kPause = absl::Milliseconds(5);

uint64_t HeldBytes(const AttributionWorld& world, uint64_t before_bytes) {
  uint64_t in_use_bytes = world.in_use_bytes();
  for (int i = 0; i < kLooks && in_use_bytes > before_bytes; ++i) {
    absl::SleepFor(kPause);
    in_use_bytes = world.in_use_bytes();
  }
  return std::max(in_use_bytes, before_bytes) - before_bytes;
}

}  // namespace

absl::StatusOr<AttributionWorld> AttributionWorld::Create(const OffloadModel& model,
                                                          const DevicePreset& preset) {
  RunOptions options;
  options.preset = preset;
  PINION_ASSIGN_OR_RETURN(Accelerator accelerator, Accelerator::Open(options));
  AttributionWorld world = {
      .accelerator = accelerator,
      .model = PutModelOn(model, accelerator.device(), /*checkpoints=*/false)};
  world.model.module->eval();
  world.accelerator.Synchronize();
  world.model_bytes = world.in_use_bytes();
  return world;
}

at::Tensor AttributionWorld::Forward(const at::Tensor& input) const {
  const at::Tensor output = model.forward(input).to(at::kFloat);
  // A picture's output becomes one sum per channel.
  return output.dim() > 2 ? output.sum({2, 3}) : output;
}

AttributedForward AttributionWorld::forward() const {
  return [this](const std::vector<at::Tensor>& inputs) { return Forward(inputs.front()); };
}

AttributionOutcome AttributionWorld::Measure(const AttributionCall& call) {
  accelerator.Synchronize();
  HeldBytes(*this, model_bytes);
  machine().ResetPeakMemory(kDevice);
  machine().ResetTimeStats(kDevice);
  AttributionOutcome outcome;
  const double begin_ms = machine().now_ms();
  outcome.results = call();
  accelerator.Synchronize();
  outcome.cost.time_us = (machine().now_ms() - begin_ms) * 1e3;
  const TimeStats times = machine().time_stats(kDevice);
  outcome.cost.arithmetic_us = times.host_arithmetic_ms * 1e3;
  outcome.cost.copied_bytes = times.d2h_bytes;
  outcome.cost.peak_bytes = machine().memory_stats(kDevice).peak_bytes;
  outcome.cost.held_bytes = HeldBytes(*this, model_bytes);
  // Copied: pinned memory is freed with the machine.
  for (at::Tensor& result : outcome.results) result = result.detach().cpu().clone();
  return outcome;
}

absl::StatusOr<AttributionOutcome> NoThrow(
    const std::string& what, const std::function<absl::StatusOr<AttributionOutcome>()>& run) {
  try {
    return run();
  } catch (const c10::Error& error) {
    return absl::InternalError(absl::StrCat(what, ": ", error.what_without_backtrace()));
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat(what, ": ", error.what()));
  }
}

}  // namespace pinion
