// Draws random models, small enough to run hundreds of them with real values. A model is a sequence
// of blocks with skips between any two. Its steps are of several kinds, which differ in branches,
// shapes, forwards in flight, and retained graphs.
//
//   const RandomModel model = RandomModel::Draw(seed);
//   RandomNet net(model, world.device());
//   for (const size_t kind : model.order) net.Step(model.steps[kind], session);
//
// Equal seeds give equal models, parameters and inputs on every device.

#ifndef PINION_TESTS_HOOKS_SUPPORT_RANDOM_MODEL_H_
#define PINION_TESTS_HOOKS_SUPPORT_RANDOM_MODEL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pinion/hooks/activations/offload_session.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {

struct RandomModel {
  enum class Layer { kRelu, kGelu, kNorm, kGate, kSoftmax, kAttention, kWide, kDropout };
  static constexpr int kLayers = 8;

  struct Block {
    Layer layer = Layer::kRelu;
    std::optional<Layer> branch;  // runs after the block in steps that take it
    std::optional<size_t> skip;   // the block whose output is added
    int checkpoints = 0;          // checkpoints nested around its layers, if requested
  };
  // One kind of step.
  struct Step {
    int64_t rows = 0;
    std::vector<bool> takes_branch;  // by block
    int forwards = 1;                // in flight at once
    int backwards = 1;               // per forward; all but the last retain the graph
    bool newest_first = false;       // order of the backwards

    std::string ToString() const;
  };

  uint64_t seed = 0;
  int64_t channels = 0;
  std::vector<Block> blocks;
  std::vector<Step> steps;
  std::vector<size_t> order;  // indices into `steps`; each occurs at least once

  static RandomModel Draw(uint64_t seed);
};

class RandomNet {
 public:
  RandomNet(const RandomModel& model, c10::Device device);

  // Runs a training step, with forwards in scopes of `session` unless it is null, and updates the
  // parameters. Returns the gradients and the sum of losses.
  Gradients Step(const RandomModel::Step& step, const std::shared_ptr<OffloadSession>& session);

  // Runs a block's layers through `checkpointing`, once per checkpoint; by default plainly.
  using Layers = std::function<at::Tensor(at::Tensor x)>;
  using Checkpointing = std::function<at::Tensor(const Layers& layers, at::Tensor x)>;
  void set_checkpointing(Checkpointing checkpointing) { checkpointing_ = std::move(checkpointing); }

 private:
  at::Tensor Loss(const RandomModel::Step& step, int forward) const;
  at::Tensor Run(RandomModel::Layer layer, const at::Tensor& x, const at::Tensor* parameters) const;

  const RandomModel model_;
  std::vector<at::Tensor> parameters_;
  at::Tensor inputs_;
  Checkpointing checkpointing_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_SUPPORT_RANDOM_MODEL_H_
