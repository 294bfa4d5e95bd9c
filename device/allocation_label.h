// Labels device allocations of this thread, so that an out-of-memory report names their owner.
//
//   AllocationLabel label("optimizer state");
//   optimizer.step();
//
// Thread safety: per thread. The outermost label wins. One that ends on another thread logs an
// error and stays.

#ifndef PINION_DEVICE_ALLOCATION_LABEL_H_
#define PINION_DEVICE_ALLOCATION_LABEL_H_

#include <string>
#include <string_view>
#include <thread>

namespace pinion {

class [[nodiscard]] AllocationLabel {
 public:
  [[nodiscard]] explicit AllocationLabel(std::string_view label);
  ~AllocationLabel();
  AllocationLabel(const AllocationLabel&) = delete;
  AllocationLabel& operator=(const AllocationLabel&) = delete;

  static const std::string& Current();  // "" outside of any label

 private:
  const bool outermost_;
  const std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace pinion

#endif  // PINION_DEVICE_ALLOCATION_LABEL_H_
