// One call of an attribution method on the emulated device, by Captum or by Pinion.
//
//   PINION_ASSIGN_OR_RETURN(const AttributionCase of, AttributionCase::Create(model,
//   "a100_pcie4")); PINION_ASSIGN_OR_RETURN(const AttributionOutcome outcome, of.Run({.kind =
//   Kind::kPinion}));
//
// Attributes all blocks of the model in evaluation mode. Parameters require gradients, as after
// training. The target is one class of each example.
//
// Thread safety: none: each run registers an emulated machine of its own as "emu".

#ifndef PINION_BENCH_ATTRIBUTION_ATTRIBUTION_CASE_H_
#define PINION_BENCH_ATTRIBUTION_ATTRIBUTION_CASE_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/bench/attribution/attribution_table.h"
#include "pinion/bench/attribution/attribution_world.h"
#include "pinion/bench/attribution/copy_bound.h"
#include "pinion/bench/offload/offload_model.h"
#include "pinion/device/emulated/cost_model.h"

namespace pinion {

class AttributionCase {
 public:
  // NotFound names all presets.
  static absl::StatusOr<AttributionCase> Create(const OffloadModel& model,
                                                const std::string& preset);

  // Runs every way. Compares results with those of Captum's default.
  absl::StatusOr<std::vector<AttributionRow>> RunAll() const;
  absl::StatusOr<AttributionOutcome> Run(const AttributionWay& way) const;

 private:
  // Measured from the plain step of a method.
  struct Step {
    std::vector<std::string> layers;
    std::vector<ReadyTensor> captures;
    double time_us = 0;
  };

  AttributionCase() = default;
  absl::StatusOr<Step> Probe(AttributionWay::Method method) const;

  OffloadModel model_;
  std::string preset_name_;
  DevicePreset preset_;
  std::map<AttributionWay::Method, Step> steps_;
};

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_ATTRIBUTION_CASE_H_
