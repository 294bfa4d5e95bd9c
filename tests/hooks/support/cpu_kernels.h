// Which of the CPU's kernels the tests of exact results run with, "emu" having the same.

#ifndef PINION_TESTS_HOOKS_SUPPORT_CPU_KERNELS_H_
#define PINION_TESTS_HOOKS_SUPPORT_CPU_KERNELS_H_

#include <ATen/Context.h>

#include <cstdlib>
#include <string>

namespace pinion::testing {

// PINION_TEST_ONEDNN=off takes LibTorch's own instead of oneDNN's. LibTorch and oneDNN themselves
// read ATEN_CPU_CAPABILITY (default, avx2, avx512) and ONEDNN_MAX_CPU_ISA (AVX2, ...).
inline void ChooseCpuKernels() {
  const char* const onednn = std::getenv("PINION_TEST_ONEDNN");
  at::globalContext().setUserEnabledMkldnn(onednn == nullptr || std::string(onednn) != "off");
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_SUPPORT_CPU_KERNELS_H_
