// Selects the CPU kernels for tests that compare bits; "emu" uses the same kernels.

#ifndef PINION_TESTS_HOOKS_SUPPORT_CPU_KERNELS_H_
#define PINION_TESTS_HOOKS_SUPPORT_CPU_KERNELS_H_

#include <ATen/Context.h>

#include <cstdlib>
#include <string>

namespace pinion::testing {

// PINION_TEST_ONEDNN=off selects LibTorch's own kernels in place of oneDNN's. LibTorch and oneDNN
// also read ATEN_CPU_CAPABILITY (default, avx2, avx512) and ONEDNN_MAX_CPU_ISA (AVX2, ...).
inline void ChooseCpuKernels() {
  const char* const onednn = std::getenv("PINION_TEST_ONEDNN");
  at::globalContext().setUserEnabledMkldnn(onednn == nullptr || std::string(onednn) != "off");
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_SUPPORT_CPU_KERNELS_H_
