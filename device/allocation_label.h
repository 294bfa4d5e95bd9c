// Names who allocates device memory on this thread, so that an out-of-memory report can say who
// holds what.
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

  static const std::string& Current();  // "" without one

 private:
  bool outermost_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_ALLOCATION_LABEL_H_
