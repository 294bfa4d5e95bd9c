// Activation checkpointing for LibTorch: torch.utils.checkpoint, the variant without reentrant
// autograd (use_reentrant=False).
//
//   at::Tensor y = pinion::checkpoint(segment, x, mask);
//   at::Tensor z = pinion::checkpoint(pinion::CheckpointOptions{.early_stop = false}, segment, x);
//
// What autograd would save while `segment(x, mask)` runs is not kept. The first node of a backward
// that needs any of it runs the segment again, once for that backward, and each tensor goes as soon
// as it is read. Gradients have the bits that they have without, if the segment does the same each
// time. checkpoint_module.h has checkpoint_sequential and a module, nn::Checkpoint.
//
// Inputs: tensors among the inputs are saved as an operator saves its own, by whoever packs saved
// tensors around the checkpoint: inside an OffloadScope (offload_session.h) they wait in host
// memory. All other inputs are copied and kept, as is the segment itself, so what they refer to has
// to outlive the graph: capture modules by their holders. A tensor inside of another value stays
// on the device. When it is computed again the segment gets its inputs without their history, each
// requiring a gradient if it did.
//
// Restored while the segment is computed again: autocast, the current streams of all devices and
// the current device, and random numbers (CheckpointOptions). Not restored: weights that the
// segment refers to and that were changed meanwhile, which autograd would refuse without a
// checkpoint.
//
// Nests: an inner checkpoint's inputs are saved to the outer one, so a backward computes the outer
// segment again first. SavedTensorScopes that the segment opens, an OffloadScope among them, keep
// what is saved in them. With gradients switched off (NoGradGuard) a checkpoint does nothing.
//
// Errors are c10::Error: in backward if what was computed again differs in number, shape, dtype or
// device from what was saved, if one backward reads a saved tensor twice, or if a tensor was
// changed in place; whatever the segment throws; in forward, the message of
// DisableSavedTensorsHooks (saved_tensors_hooks.h).
//
// Thread safety: as autograd's. One segment of the process is computed again at a time, since that
// sets the generators of random numbers, which all threads share. A segment that spans several
// devices and calls backward within itself may wait for ever for a device's worker that waits for
// its own turn.

#ifndef PINION_HOOKS_CHECKPOINT_CHECKPOINT_H_
#define PINION_HOOKS_CHECKPOINT_CHECKPOINT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "pinion/hooks/checkpoint/checkpoint_options.h"

namespace pinion {
namespace checkpoint_internal {

using RunAgain = std::function<void(const std::vector<at::Tensor>& inputs)>;

// While it lives, what autograd saves on this thread is left to `again` to compute.
class ForwardScope {
 public:
  ForwardScope(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs,
               RunAgain again);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

// Calls `use` with each tensor among the values, in order.
template <typename Values, typename Use>
void ForEachTensor(Values& values, Use use) {
  const auto visit = [&use](auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, at::Tensor>) use(value);
  };
  std::apply([&visit](auto&... value) { (visit(value), ...); }, values);
}

// `values` are the inputs, with nothing in the place of tensors.
template <typename Segment, typename Values>
RunAgain Again(Segment segment, Values values) {
  return [segment = std::move(segment),
          values = std::move(values)](const std::vector<at::Tensor>& tensors) mutable {
    Values inputs = values;
    size_t next = 0;
    ForEachTensor(inputs, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
    std::apply(segment, inputs);
  };
}

}  // namespace checkpoint_internal

// Returns what `segment(inputs...)` returns; throws what that throws.
template <typename Segment, typename... Inputs>
requires std::is_invocable_v < std::decay_t<Segment>
&, std::decay_t<Inputs>&... >
       auto checkpoint(const CheckpointOptions& options, Segment&& segment, Inputs&&... inputs) {
  std::decay_t<Segment> run(std::forward<Segment>(segment));
  std::tuple<std::decay_t<Inputs>...> values(std::forward<Inputs>(inputs)...);
  if (!c10::GradMode::is_enabled()) return std::apply(run, values);
  std::vector<at::Tensor> tensors;
  auto others = values;
  checkpoint_internal::ForEachTensor(others, [&tensors](at::Tensor& tensor) {
    tensors.push_back(std::exchange(tensor, at::Tensor()));
  });
  const checkpoint_internal::ForwardScope scope(options, tensors,
                                                checkpoint_internal::Again(run, std::move(others)));
  tensors.clear();  // the segment may let go of its inputs
  return std::apply(run, values);
}

template <typename Segment, typename... Inputs>
requires std::is_invocable_v < std::decay_t<Segment>
&, std::decay_t<Inputs>&... > auto checkpoint(Segment&& segment, Inputs&&... inputs) {
  return checkpoint(CheckpointOptions(), std::forward<Segment>(segment),
                    std::forward<Inputs>(inputs)...);
}

}  // namespace pinion

#endif  // PINION_HOOKS_CHECKPOINT_CHECKPOINT_H_
