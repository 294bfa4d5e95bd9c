#include "pinion/hooks/autograd/kernel_scope.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {
namespace {

// The key is below autograd, which has then saved the arguments, and above all kernels.
constexpr c10::DispatchKey kBeforeKernel = c10::DispatchKey::Fake;

void RunKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  BeforeKernel(op.schema());
  const c10::impl::ExcludeDispatchKeyGuard inside(kBeforeKernel);
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kBeforeKernel),
                     stack);
}

void RegisterKernelFallback() {
  static const torch::Library* const library = [] {
    auto* all = new torch::Library(torch::Library::IMPL, "_", kBeforeKernel, __FILE__, __LINE__);
    all->fallback(torch::CppFunction::makeFromBoxedFunction<&RunKernel>());
    return all;
  }();
  static_cast<void>(library);
}

// Removes the exclusion as well, since a kernel may run a backward.
c10::impl::LocalDispatchKeySet WithKey() {
  RegisterKernelFallback();
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.included_ = keys.included_.add(kBeforeKernel);
  keys.excluded_ = keys.excluded_.remove(kBeforeKernel);
  return keys;
}

}  // namespace

KernelScope::KernelScope() : keys_(WithKey()) {}

}  // namespace pinion
