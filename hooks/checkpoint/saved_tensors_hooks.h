// User-defined saved-tensor hooks in C++, and a guard that forbids hooks:
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
// The innermost of these hooks, OffloadScope, checkpoint() and Python's hooks packs.
//
// Thread safety: a scope belongs to the thread that makes it; LibTorch carries it to its worker
// threads. Hooks are called from any thread. A scope that ends out of order, or on another thread,
// logs an error and has no effect from then on.

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

// An open DisableSavedTensorsHooks (saved_tensors_hooks.cc).
struct DisabledHooks;

}  // namespace checkpoint_internal

// Calls `pack(tensor)` for each tensor that autograd saves on this thread, and `unpack` with the
// result, of any type, when backward needs the tensor.
//
// `pack` gets the saved tensor with its history. Its result must not refer to the tensor, or the
// graph keeps itself alive; returning the tensor itself is safe. `pack` must not change the tensor:
// autograd throws c10::Error. `unpack` returns a tensor with the same content, a new one or the
// same each time. Both may throw, and may be called by several threads at once. `pack` lives as
// long as the scope, `unpack` as long as the last graph made in it.
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

// Makes the opening of any hooks except NoOffloadScope throw c10::Error with `message` on this
// thread, also in backwards that recompute a checkpoint. The constructor throws `message` inside
// hooks. Nests: the innermost message is used.
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
