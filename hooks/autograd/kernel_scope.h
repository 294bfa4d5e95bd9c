// Calls the packer before each operator's kernel, after autograd has saved the operator's inputs.
//
//   class Stops : public SavedTensorPacker {
//     void BeforeKernel(const c10::FunctionSchema&) override { if (is_done_) throw Done(); }
//     ...
//   };
//   const SavedTensorScope packs(std::make_shared<Stops>());
//   const KernelScope scope;
//   function();  // throws Done before the next kernel, as if that kernel had failed
//
// Stop a function here rather than in Pack: a custom function whose Pack throws keeps a reference
// to itself and leaks. LibTorch expects that any kernel may throw.
//
// The scope uses DispatchKey::Fake, which LibTorch reserves for torchdistx: a process cannot use
// both.
//
// Thread safety: a scope belongs to one thread. LibTorch carries it to the threads of a backward
// that this thread runs.

#ifndef PINION_HOOKS_AUTOGRAD_KERNEL_SCOPE_H_
#define PINION_HOOKS_AUTOGRAD_KERNEL_SCOPE_H_

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace pinion {

// Calls SavedTensorPacker::BeforeKernel of the innermost SavedTensorScope for each operator on this
// thread. Exception: operators that a kernel calls.
class [[nodiscard]] KernelScope {
 public:
  [[nodiscard]] KernelScope();

 private:
  const c10::impl::ForceDispatchKeyGuard keys_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_KERNEL_SCOPE_H_
