// Steps of a model on the emulated device, with resident weights, copies by hand or streamed
// weights.
//
//   PINION_ASSIGN_OR_RETURN(const WeightsCase of, WeightsCase::Create("a100_pcie4", 32, true));
//   PINION_ASSIGN_OR_RETURN(const std::vector<WeightsRow> rows, of.RunAll());
//
// The model is 24 residual layers, x + relu(Linear(x)). They stand for layers of kModelScale times
// the width and the batch, on a preset scaled to match (device/emulated/cost_model.h). Times are
// those of the large model divided by kModelScale^2.
//
// Thread safety: none: each run registers an emulated machine of its own as "emu".

#ifndef PINION_BENCH_WEIGHTS_WEIGHTS_CASE_H_
#define PINION_BENCH_WEIGHTS_WEIGHTS_CASE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/bench/weights/phase_bound.h"
#include "pinion/bench/weights/trainee.h"
#include "pinion/device/emulated/cost_model.h"

namespace pinion {

constexpr int64_t kModelScale = 32;

// Averages of the measured steps. The phase is forward and backward until the optimizer has the
// gradients.
struct WeightsCost {
  double phase_us = 0;
  double host_step_us = 0;
  double compute_us = 0;  // of kernels in the phase
  uint64_t peak_bytes = 0;
  uint64_t fetched_bytes = 0;   // over the link, step included
  uint64_t gradient_bytes = 0;  // over the link
};

struct WeightsRow {
  std::string preset;
  int64_t batch = 0;  // of the large model
  bool training = false;
  WeightsWay way;
  WeightsCost cost;
  uint64_t target_bytes = 0;  // 0: none
  PhaseBound bound;           // for a WeightOffloader
  bool is_hidden = false;     // the link hides the weights, except for the ends
  bool same_values = true;    // results and weights equal those without offload
};

class WeightsCase {
 public:
  // `batch` examples of the small model. NotFound names all presets.
  static absl::StatusOr<WeightsCase> Create(const std::string& preset, int64_t batch,
                                            bool training);

  // Runs every placement, no offload first.
  absl::StatusOr<std::vector<WeightsRow>> RunAll() const;

 private:
  struct Outcome {
    WeightsCost cost;
    ComputeTimes compute;
    uint64_t others_bytes = 0;       // without offload, at the end of forward
    std::vector<at::Tensor> values;  // in pageable memory
  };

  WeightsCase() = default;
  absl::StatusOr<Outcome> Run(const WeightsWay& way, uint64_t target_bytes = 0) const;
  PhaseBound BoundOf(const WeightsRow& row, const Outcome& none) const;

  std::string preset_name_;
  DevicePreset preset_;  // scaled
  int64_t batch_ = 0;
  bool training_ = false;
};

}  // namespace pinion

#endif  // PINION_BENCH_WEIGHTS_WEIGHTS_CASE_H_
