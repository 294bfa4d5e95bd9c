// Calls of attribution methods on the emulated device, by Captum and by Pinion: memory, time,
// copies and values.
//
// Parameters require gradients, as after training. The target is one class of each example.
//
// Thread safety: none: each run registers an emulated machine of its own as "emu".

#ifndef PINION_BENCH_ATTRIBUTION_ATTRIBUTION_CASE_H_
#define PINION_BENCH_ATTRIBUTION_ATTRIBUTION_CASE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/bench/attribution/attribution_table.h"
#include "pinion/bench/offload/offload_model.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/target.h"
#include "pinion/programs/accelerator.h"

namespace pinion {

// One call of a method; returns its results by layer.
using AttributionCall = std::function<std::vector<at::Tensor>()>;

struct AttributionOutcome {
  AttributionCost cost;
  std::vector<at::Tensor> results;  // in pageable memory
};

// A model on its own emulated machine, ready for attribution, and the cost of a call. The model is
// in evaluation mode.
struct AttributionWorld {
  static constexpr int kDevice = 0;

  static absl::StatusOr<AttributionWorld> Create(const OffloadModel& model,
                                                 const DevicePreset& preset);

  Accelerator accelerator;
  ModelOnDevice model;
  Target target = Target::Class(1);
  uint64_t model_bytes = 0;  // on the device: the model and its inputs

  EmulatedMachine& machine() const { return *accelerator.machine(); }
  std::vector<at::Tensor> inputs() const { return {model.input}; }
  // [examples, classes], in float32
  at::Tensor Forward(const at::Tensor& input) const;
  // Returns Forward of the first input. The world outlives it.
  AttributedForward forward() const;
  uint64_t in_use_bytes() const { return machine().memory_stats(kDevice).in_use_bytes; }

  // Waits until memory of earlier calls is freed, then measures `call`.
  AttributionOutcome Measure(const AttributionCall& call);
};

// Attributes all blocks of the model in every way. Compares results with those of Captum's default.
// NotFound names all presets.
absl::StatusOr<std::vector<AttributionRow>> RunWays(const OffloadModel& model,
                                                    const std::string& preset);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_ATTRIBUTION_CASE_H_
