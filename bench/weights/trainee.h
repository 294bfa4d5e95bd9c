// A model of equal layers that is trained or asked with its weights on the device, copied in and
// out by hand, or visiting.
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

// The same in every process, and no two phases alike.
at::Tensor Waves(at::IntArrayRef shape, double phase);

// Who has the weights where.
struct WeightsWay {
  enum class Kind {
    kNone,      // all of them on the device, and so is the optimizer's step
    kBlocking,  // by hand: each layer's copied in before its use, and its gradient out behind it
    kVisiting,  // a WeightOffloader with a window
    kTarget,    // a WeightOffloader with a memory target
    kShared,    // the same, and an OffloadSession has the same target, so that activations leave
  };
  Kind kind = Kind::kNone;
  int window_layers = 0;   // of kVisiting
  int target_percent = 0;  // of the peak without offload; of kTarget and kShared

  bool visits() const { return kind != Kind::kNone && kind != Kind::kBlocking; }
  // "no offload", "blocking", "visiting, 2 layers", "target 50 %", "target 50 %, shared"
  std::string name() const;
};

// A model where its way puts it.
class Trainee {
 public:
  virtual ~Trainee() = default;
  // Training: until nobody needs the graph any more.
  virtual at::Tensor Forward(at::Tensor x) = 0;
  // Blocks until gradients are where the optimizer is.
  virtual void Settle() {}
  virtual void Step() = 0;
  virtual std::vector<at::Tensor> Weights() const = 0;
};

// In a memory target of so many bytes, where the way has one. The accelerator outlives it.
absl::StatusOr<std::unique_ptr<Trainee>> MakeTrainee(const WeightsWay& way, uint64_t target_bytes,
                                                     Accelerator& accelerator);

}  // namespace pinion

#endif  // PINION_BENCH_WEIGHTS_TRAINEE_H_
