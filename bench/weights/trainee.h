// A model of equal layers for training or inference. Its weights are on the device, copied by hand,
// or streamed by a WeightOffloader.
//
//   PINION_ASSIGN_OR_RETURN(const auto trainee, MakeTrainee(way, target_bytes, accelerator));
//   trainee->Forward(x).sum().backward();
//   trainee->Settle();
//   trainee->Step();
//
// Thread safety: none.

#ifndef PINION_BENCH_WEIGHTS_TRAINEE_H_
#define PINION_BENCH_WEIGHTS_TRAINEE_H_

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

uint64_t LayerBytes();  // on the device

// Returns the same values in every process, and other values for each phase.
at::Tensor Waves(at::IntArrayRef shape, double phase);

// The placement of the weights.
struct WeightsWay {
  enum class Kind {
    kNone,      // all of them on the device, and so is the optimizer's step
    kBlocking,  // by hand: a copy before each layer's use, and one of its gradient
    kVisiting,  // a WeightOffloader with a window
    kTarget,    // a WeightOffloader with a memory target
    kShared,    // the same target also for an OffloadSession's activations
  };
  Kind kind = Kind::kNone;
  int window_layers = 0;   // of kVisiting
  int target_percent = 0;  // of the peak without offload; of kTarget and kShared

  bool visits() const { return kind != Kind::kNone && kind != Kind::kBlocking; }
  // "no offload", "blocking", "visiting, 2 layers", "target 50 %", "target 50 %, shared"
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
  virtual std::vector<at::Tensor> Weights() const = 0;
};

// `target_bytes` is the memory target of kTarget and kShared. The accelerator outlives the trainee.
absl::StatusOr<std::unique_ptr<Trainee>> MakeTrainee(const WeightsWay& way, uint64_t target_bytes,
                                                     Accelerator& accelerator);

}  // namespace pinion

#endif  // PINION_BENCH_WEIGHTS_TRAINEE_H_
