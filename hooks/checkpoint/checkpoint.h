// Activation checkpointing for LibTorch: torch.utils.checkpoint with use_reentrant=False.
//
//   at::Tensor y = pinion::checkpoint(segment, x, mask);
//   at::Tensor z = pinion::checkpoint(pinion::CheckpointOptions{.early_stop = false}, segment, x);
//   at::Tensor w = pinion::checkpoint(pinion::CheckpointOptions{.if_planned = true}, segment, x);
//
// Tensors that autograd saves in `segment(x, mask)` are not kept. The first node of a backward that
// needs one runs the segment again, once per backward, and each tensor is freed after it is read.
// Gradients are bit-identical if the segment is deterministic. With if_planned a session's plan may
// keep the segment instead. checkpoint_module.h has checkpoint_sequential and nn::Checkpoint.
//
// Inputs: tensors among the inputs are saved as an operator saves its inputs, also those in
// vectors, optionals, pairs, tuples and arrays. Inside an OffloadScope (offload_session.h) they can
// be offloaded. Other inputs and the segment itself are copied and live as long as the graph, so
// capture modules by their holders. A tensor inside any other value, or captured by the segment,
// stays on the device with its history, and in-place changes of it are not detected.
//
// A recomputation gets the inputs without their history. They require gradients, and are leaves,
// exactly if they did and were in forward. Each run uses a new copy of the segment as it was before
// forward. Pass std::ref(segment) to share its state.
//
// A recomputation restores autocast, the current device, the current streams of all devices, and
// random number generators (CheckpointOptions). It does not restore weights that were changed after
// forward; without a checkpoint autograd would report such a change.
//
// Nesting: the outer checkpoint saves an inner one's inputs, so a backward first recomputes the
// outer segment. A SavedTensorScope or OffloadScope inside the segment keeps what is saved in it.
// With gradients switched off (NoGradGuard) a checkpoint has no effect.
//
// Errors of the segment pass through. Others are c10::Error:
//   - in forward: the segment is an empty function or module,
//   - in forward, and in a backward that needs a segment: the message of a DisableSavedTensorsHooks
//     around it (saved_tensors_hooks.h),
//   - in backward: the recomputation saved other tensors (number, shape, dtype or device), one
//     backward reads a saved tensor twice, or a tensor was changed in place.
//
// Thread safety: as autograd's. Random number generators belong to the process, so segments with
// preserve_rng_state are recomputed one at a time. Another thread that uses a generator meanwhile
// repeats forward's random numbers, and its draws are undone afterwards. Such a segment deadlocks
//   - if it waits for another thread that must first recompute a segment (a barrier, or a
//     collective among threads of the process);
//   - if it needs a lock whose owner waits to recompute a segment: Python's GIL, if backward was
//     called with it;
//   - if it calls a backward that reads inner segments on another thread: a worker of another
//     device or of the CPU (autograd also changes threads at 60 nested backwards).
// Without preserve_rng_state only recomputations of the same segment wait for each other.

#ifndef PINION_HOOKS_CHECKPOINT_CHECKPOINT_H_
#define PINION_HOOKS_CHECKPOINT_CHECKPOINT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "pinion/hooks/checkpoint/callable.h"
#include "pinion/hooks/checkpoint/checkpoint_options.h"

namespace pinion {
namespace checkpoint_internal {

// Runs a segment again on its unpacked inputs.
using RunAgain = std::function<void(const std::vector<at::Tensor>& inputs)>;

// Makes autograd save handles that `again` recomputes, unless a plan keeps the segment
// (CheckpointOptions::if_planned).
class [[nodiscard]] ForwardScope {
 public:
  [[nodiscard]] ForwardScope(const CheckpointOptions& options,
                             const std::vector<at::Tensor>& inputs, RunAgain again);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

// Calls `use` with each tensor in a value, in order. Containers nest.
template <typename Use>
class ForEachTensor {
 public:
  explicit ForEachTensor(Use use) : use_(std::move(use)) {}

  void In(at::Tensor& tensor) const { use_(tensor); }
  template <typename Value>
  void In(std::optional<Value>& value) const {
    if (value.has_value()) In(*value);
  }
  template <typename Value, typename Allocator>
  void In(std::vector<Value, Allocator>& values) const {
    for (auto&& value : values) In(value);
  }
  template <typename Value, size_t size>
  void In(std::array<Value, size>& values) const {
    for (Value& value : values) In(value);
  }
  template <typename First, typename Second>
  void In(std::pair<First, Second>& values) const {
    In(values.first);
    In(values.second);
  }
  template <typename... Values>
  void In(std::tuple<Values...>& values) const {
    std::apply([&](auto&... value) { (In(value), ...); }, values);
  }
  template <typename Other>
  void In(Other&) const {}

 private:
  const Use use_;
};

// Returns a function that runs `segment`. `values` are the inputs with undefined tensors in them.
template <typename Segment, typename Values>
RunAgain Again(Segment segment, Values values) {
  return [segment = std::move(segment),
          values = std::move(values)](const std::vector<at::Tensor>& tensors) {
    Segment run = segment;
    Values inputs = values;
    size_t next = 0;
    ForEachTensor([&](at::Tensor& tensor) { tensor = tensors[next++]; }).In(inputs);
    std::apply(run, inputs);
  };
}

template <typename Value>
using CopyOf = std::add_lvalue_reference_t<std::decay_t<Value>>;

template <typename Segment, typename... Inputs>
concept TakesCopiesOf = std::is_invocable_v<CopyOf<Segment>, CopyOf<Inputs>...>;

}  // namespace checkpoint_internal

// Runs `segment(inputs...)` as a checkpoint and returns its result.
template <typename Segment, typename... Inputs>
requires checkpoint_internal::TakesCopiesOf<Segment, Inputs...>
auto checkpoint(const CheckpointOptions& options, Segment&& segment, Inputs&&... inputs) {
  std::decay_t<Segment> run(std::forward<Segment>(segment));
  checkpoint_internal::CheckCallable(run, "the segment of checkpoint()");
  std::tuple<std::decay_t<Inputs>...> values(std::forward<Inputs>(inputs)...);
  if (!c10::GradMode::is_enabled()) return std::apply(run, values);
  std::vector<at::Tensor> tensors;
  auto others = values;
  checkpoint_internal::ForEachTensor([&tensors](at::Tensor& tensor) {
    tensors.push_back(std::exchange(tensor, at::Tensor()));
  }).In(others);
  const checkpoint_internal::ForwardScope scope(options, tensors,
                                                checkpoint_internal::Again(run, std::move(others)));
  tensors.clear();  // the segment may release its inputs
  return std::apply(run, values);
}

template <typename Segment, typename... Inputs>
requires checkpoint_internal::TakesCopiesOf<Segment, Inputs...>
auto checkpoint(Segment&& segment, Inputs&&... inputs) {
  return checkpoint(CheckpointOptions(), std::forward<Segment>(segment),
                    std::forward<Inputs>(inputs)...);
}

}  // namespace pinion

#endif  // PINION_HOOKS_CHECKPOINT_CHECKPOINT_H_
