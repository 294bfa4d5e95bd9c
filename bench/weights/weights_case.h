// Steps of a model on the emulated device, with resident weights, copies by hand or streamed
// weights.
//
//   PINION_ASSIGN_OR_RETURN(const auto rows, RunWeights("a100_pcie4", 32, /*training=*/true));
//
// The model is 24 residual layers, x + relu(Linear(x)). They stand for layers of 32 times the width
// and the batch, on a preset scaled to match (device/emulated/cost_model.h). Times are those of the
// large model divided by 32^2.
//
// Thread safety: none: each run registers an emulated machine of its own as "emu".

#ifndef PINION_BENCH_WEIGHTS_WEIGHTS_CASE_H_
#define PINION_BENCH_WEIGHTS_WEIGHTS_CASE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/programs/accelerator.h"

namespace pinion {

constexpr int kModelLayers = 24;

constexpr int64_t kModelWidth = 256;
constexpr int kTrainedDevice = 0;
using Tensors = std::vector<at::Tensor>;

// Returns a layer's bytes on the device.
uint64_t LayerBytes();

// Returns the same values in every process, and other values for each phase.
at::Tensor Waves(at::IntArrayRef shape, double phase);

// The placement of the weights.
struct WeightsWay {
  enum class Kind {
    kNone,      // all of them on the device, and so is the optimizer's step
    kBlocking,  // by hand: a copy before each layer's use, and one of its gradient
    kStreamed,  // a WeightOffloader with a window
    kTarget,    // a WeightOffloader with a memory target
    kShared,    // the same target also for an OffloadSession's activations
  };
  Kind kind = Kind::kNone;
  int window_layers = 0;   // of kStreamed
  int target_percent = 0;  // of the peak without offload; of kTarget and kShared

  bool streams() const { return kind != Kind::kNone && kind != Kind::kBlocking; }
  // "no offload", "blocking", "streamed, 2 layers", "target 50 %", "target 50 %, shared"
  std::string name() const;
};

// A model with a placement of its weights.
class Trainee {
 public:
  virtual ~Trainee() = default;
  // In training, valid until the graph is freed.
  virtual at::Tensor Forward(at::Tensor x) = 0;
  // Blocks until gradients are where the optimizer is.
  virtual void Settle() {}
  virtual void Step() = 0;
  virtual Tensors Weights() const = 0;
};

// `target_bytes` is the memory target of kTarget and kShared. The accelerator outlives the trainee.
absl::StatusOr<std::unique_ptr<Trainee>> MakeTrainee(const WeightsWay& way, uint64_t target_bytes,
                                                     Accelerator& accelerator);

// The bound of a step's forward and backward.
struct PhaseBound {
  // The first fetch and the last gradient's copy, which nothing can hide.
  double ends_us = 0;
  // Forward and backward without the ends: the larger of compute and transfers, at the link's
  // duplex rates.
  double overlapped_us = 0;

  double total_us() const { return ends_us + overlapped_us; }
};

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

// Runs every placement, no offload first, with `batch` examples of the small model. NotFound names
// all presets.
absl::StatusOr<std::vector<WeightsRow>> RunWeights(const std::string& preset, int64_t batch,
                                                   bool training);

}  // namespace pinion

#endif  // PINION_BENCH_WEIGHTS_WEIGHTS_CASE_H_
