#include "pinion/hooks/emulated/emu_autocast.h"

#include <ATen/autocast_mode.h>

namespace pinion::emu {

void RegisterAutocast(torch::Library& m) {  // LibTorch's macros say `m`
  using namespace at;  // for LibTorch's macros, which name types that differ between releases
#define PINION_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(PINION_LOWER_PRECISION)
#undef PINION_LOWER_PRECISION
#define PINION_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(PINION_FP32)
#undef PINION_FP32
#define PINION_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(PINION_FP32_DTYPE)
#undef PINION_FP32_DTYPE
#define PINION_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PINION_PROMOTE)
#undef PINION_PROMOTE
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
}

}  // namespace pinion::emu
