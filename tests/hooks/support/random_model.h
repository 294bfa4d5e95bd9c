// Models that nobody has thought of, small enough to run hundreds of them with values: blocks of
// any kind one after the other, with skips between any two, and steps of several kinds, which take
// other branches, have other shapes, several forwards in flight, or graphs that are kept.
//
//   const RandomModel model = RandomModel::Draw(seed);
//   RandomNet net(model, world.device());
//   for (const size_t kind : model.order) net.Step(model.steps[kind], session);
//
// Equal seeds give equal models, parameters and inputs, whatever the device.

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
    std::optional<Layer> branch;  // behind it, in steps that take it
    std::optional<size_t> skip;   // the block whose output is added
    int checkpoints = 0;  // around its layers, one within the other, where they are asked for
  };
  // What a step does, out of several kinds that take turns.
  struct Step {
    int64_t rows = 0;
    std::vector<bool> takes_branch;  // by block
    int forwards = 1;                // in flight at once
    int backwards = 1;               // of each forward: all but the last keep the graph
    bool newest_first = false;       // the order of the backwards

    std::string ToString() const;
  };

  uint64_t seed = 0;
  int64_t channels = 0;
  std::vector<Block> blocks;
  std::vector<Step> steps;
  std::vector<size_t> order;  // of a run: places in `steps`; each comes at least once

  static RandomModel Draw(uint64_t seed);
};

class RandomNet {
 public:
  RandomNet(const RandomModel& model, c10::Device device);

  // A step of training, with its forwards in scopes of `session` unless that is null: what it
  // leaves, with the sum of its losses. The parameters learn from it.
  Gradients Step(const RandomModel::Step& step, const std::shared_ptr<OffloadSession>& session);

  // Runs a block's layers as `checkpointing` does it, once for each checkpoint around them. By
  // default they run as they are.
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
