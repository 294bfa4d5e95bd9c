// Labels device allocations of this thread, so that an out-of-memory report names their owner.
//
//   AllocationLabel label("optimizer state");
//   optimizer.step();
//
// Thread safety: per thread. The outermost label wins.

#ifndef PINION_DEVICE_ALLOCATION_LABEL_H_
#define PINION_DEVICE_ALLOCATION_LABEL_H_

#include <string>
#include <string_view>

namespace pinion {

class [[nodiscard]] AllocationLabel {
 public:
  [[nodiscard]] explicit AllocationLabel(std::string_view label);
  ~AllocationLabel();
  AllocationLabel(const AllocationLabel&) = delete;
  AllocationLabel& operator=(const AllocationLabel&) = delete;

  static const std::string& Current();  // "" outside of any label

 private:
  bool outermost_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_ALLOCATION_LABEL_H_
