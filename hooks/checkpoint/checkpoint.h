// Activation checkpointing for LibTorch: torch.utils.checkpoint, the variant without reentrant
// autograd (use_reentrant=False).
//
//   at::Tensor y = pinion::checkpoint(segment, x, mask);
//   at::Tensor z = pinion::checkpoint(pinion::CheckpointOptions{.early_stop = false}, segment, x);
//   at::Tensor w = pinion::checkpoint(pinion::CheckpointOptions{.if_planned = true}, segment, x);
//
// What autograd would save while `segment(x, mask)` runs is not kept. The first node of a backward
// that needs any of it runs the segment again, once for that backward, and each tensor goes as soon
// as it is read. Gradients have the bits that they have without, if the segment does the same each
// time. With CheckpointOptions::if_planned a session's plan may keep the segment instead.
// checkpoint_module.h has checkpoint_sequential and a module, nn::Checkpoint.
//
// Inputs: tensors among the inputs, those inside of vectors, optionals, pairs, tuples and arrays
// included, are saved as an operator saves its own, by whoever packs saved tensors around the
// checkpoint: inside an OffloadScope (offload_session.h) they wait in host memory. All other inputs
// are copied and kept, as is the segment itself, so what they refer to has to outlive the graph:
// capture modules by their holders. A tensor inside of any other value, or captured by the segment,
// stays on the device with its history, and nobody checks whether it was changed in place.
//
// When it is computed again the segment gets its inputs without their history, each requiring a
// gradient, and being a leaf or none, as it did and was. Each run has its own copy of the segment,
// as it was before forward: pass std::ref(segment) to share what it changes in itself.
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
// Errors, besides what the segment throws, are c10::Error:
//   - in forward: the segment is an empty function or module,
//   - in forward, and in a backward that needs a segment: the message of DisableSavedTensorsHooks
//     (saved_tensors_hooks.h),
//   - in backward: the segment saved other tensors the second time (number, shape, dtype or
//     device), one backward reads a saved tensor twice, or a tensor was changed in place.
//
// Thread safety: as autograd's. Generators of random numbers belong to the process, so the segments
// of the process that preserve them (CheckpointOptions::preserve_rng_state) are computed again one
// at a time. A thread that draws random numbers of its own meanwhile draws some that forward has
// drawn, and its generator is set back afterwards. Such a segment waits for ever
//   - where it waits for another thread that has to compute a segment again first (a barrier, or a
//     collective among the threads of a process);
//   - where it needs a lock that a thread holds which waits to compute a segment again: Python's
//     GIL, if backward was called with it;
//   - where it calls backward within itself, and that backward reads inner segments on another
//     thread: a worker of another device, or the CPU's (and autograd goes to another thread itself
//     when backwards are nested more than 60 deep).
// Without preserve_rng_state segments wait for nobody but the same segment, and those of several
// devices are computed again at the same time.

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

using RunAgain = std::function<void(const std::vector<at::Tensor>& inputs)>;

// While it lives, what autograd saves on this thread is left to `again` to compute, unless a plan
// keeps it (CheckpointOptions::if_planned).
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

// Calls `use` with each tensor in a value, in order.
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

// `values` are the inputs, with nothing in the place of tensors.
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

// Returns what `segment(inputs...)` returns; throws what that throws.
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
  tensors.clear();  // the segment may let go of its inputs
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
