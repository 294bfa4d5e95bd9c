// Tells the packer of each operator after autograd has saved its arguments and before its kernel.
//
//   class Stops : public SavedTensorPacker {
//     void BeforeKernel(const c10::FunctionSchema&) override { if (is_done_) throw Done(); }
//     ...
//   };
//   const SavedTensorScope packs(std::make_shared<Stops>());
//   const KernelScope scope;
//   function();  // throws Done before the next kernel, as if that kernel had failed
//
// A packer that throws in Pack leaves LibTorch's code half done: a custom function then keeps what
// it was about to save, and with it itself. A kernel may always fail.
//
// The scope uses DispatchKey::Fake, which LibTorch reserves for torchdistx: a process cannot have
// both.
//
// Thread safety: a scope belongs to a thread. LibTorch carries it to the threads of a backward that
// the thread runs.

#ifndef PINION_HOOKS_AUTOGRAD_KERNEL_SCOPE_H_
#define PINION_HOOKS_AUTOGRAD_KERNEL_SCOPE_H_

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace pinion {

// While it lives, SavedTensorPacker::BeforeKernel of the innermost SavedTensorScope is called for
// each operator on this thread. Exception: operators that kernels call.
class [[nodiscard]] KernelScope {
 public:
  [[nodiscard]] KernelScope();

 private:
  const c10::impl::ForceDispatchKeyGuard keys_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_KERNEL_SCOPE_H_
