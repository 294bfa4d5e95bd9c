// A user's own saved-tensor hooks from C++, and a guard against anyone's:
// torch.autograd.graph.saved_tensors_hooks and disable_saved_tensors_hooks.
//
//   {
//     const pinion::SavedTensorsHooks hooks(
//         [](const at::Tensor& tensor) { return tensor.to(at::kHalf); },
//         [](const at::Tensor& half) { return half.to(at::kFloat); });
//     loss = model->forward(x);
//   }
//   const pinion::DisableSavedTensorsHooks off("this model counts on what it saves");
//
// Among these hooks, OffloadScope, checkpoint() and the hooks of Python the innermost win.
//
// Thread safety: each belongs to the thread that makes it, and goes with autograd to its workers;
// hooks are called from any thread. One that ends out of order, or on another thread, is an error
// in the log, and has no effect from then on.

#ifndef PINION_HOOKS_CHECKPOINT_SAVED_TENSORS_HOOKS_H_
#define PINION_HOOKS_CHECKPOINT_SAVED_TENSORS_HOOKS_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/checkpoint/callable.h"

namespace pinion {
namespace checkpoint_internal {

using UnpackPacked = std::function<at::Tensor()>;
using PackWithUnpack = std::function<UnpackPacked(const at::Tensor&)>;

std::shared_ptr<SavedTensorPacker> PackerOf(PackWithUnpack pack);

template <typename Function>
std::shared_ptr<Function> ShareCallable(Function function, const char* name) {
  CheckCallable(function, name);
  return std::make_shared<Function>(std::move(function));
}

// An open DisableSavedTensorsHooks, and those around it (saved_tensors_hooks.cc).
struct DisabledHooks;

}  // namespace checkpoint_internal

// While it lives, `pack(tensor)` is called for each tensor that autograd saves on this thread, and
// `unpack` with what that has returned, a value of any type, whenever backward needs the tensor.
// `pack` gets the very tensor that is saved, with its history: what it returns must not refer to
// that, or the graph keeps itself alive (returning the tensor itself is safe). It must not change
// the tensor, which autograd refuses with a c10::Error. `unpack` returns a tensor with the same
// content as a new one or the same each time. Both may throw, and be called from several threads at
// the same time. `pack` goes with the scope, `unpack` with the last graph that was made in it.
class [[nodiscard]] SavedTensorsHooks {
 public:
  template <typename Pack, typename Unpack>
  [[nodiscard]] SavedTensorsHooks(Pack pack, Unpack unpack)
      : scope_(checkpoint_internal::PackerOf(
                   [pack = checkpoint_internal::ShareCallable(
                        std::move(pack), "the pack function of SavedTensorsHooks"),
                    unpack = checkpoint_internal::ShareCallable(
                        std::move(unpack), "the unpack function of SavedTensorsHooks")](
                       const at::Tensor& tensor) -> checkpoint_internal::UnpackPacked {
                     using Packed = std::decay_t<decltype((*pack)(tensor))>;
                     auto packed = std::make_shared<Packed>((*pack)(tensor));
                     if constexpr (std::is_same_v<Packed, at::Tensor>) {
                       if (packed->is_same(tensor)) *packed = tensor.detach();
                     }
                     return [unpack, packed]() -> at::Tensor { return (*unpack)(*packed); };
                   }),
               "SavedTensorsHooks") {}

 private:
  const SavedTensorScope scope_;
};

// While it lives, opening any hooks but NoOffloadScope on this thread throws c10::Error with
// `message`, also in a backward that computes a checkpoint again. So does making one inside of
// hooks. Nests: the innermost message is told.
class [[nodiscard]] DisableSavedTensorsHooks {
 public:
  [[nodiscard]] explicit DisableSavedTensorsHooks(const std::string& message);
  ~DisableSavedTensorsHooks();
  DisableSavedTensorsHooks(const DisableSavedTensorsHooks&) = delete;
  DisableSavedTensorsHooks& operator=(const DisableSavedTensorsHooks&) = delete;

 private:
  const std::shared_ptr<checkpoint_internal::DisabledHooks> disabled_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_CHECKPOINT_SAVED_TENSORS_HOOKS_H_
