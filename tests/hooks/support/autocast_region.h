// Enables autocast to bfloat16 for its lifetime, like Python's torch.autocast.

#ifndef PINION_TESTS_HOOKS_SUPPORT_AUTOCAST_REGION_H_
#define PINION_TESTS_HOOKS_SUPPORT_AUTOCAST_REGION_H_

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace pinion::testing {

class [[nodiscard]] AutocastRegion {
 public:
  [[nodiscard]] explicit AutocastRegion(c10::DeviceType type) : type_(type) {
    at::autocast::set_autocast_enabled(type_, true);
    at::autocast::set_autocast_dtype(type_, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~AutocastRegion() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(type_, false);
  }
  AutocastRegion(const AutocastRegion&) = delete;
  AutocastRegion& operator=(const AutocastRegion&) = delete;

 private:
  const c10::DeviceType type_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_SUPPORT_AUTOCAST_REGION_H_
