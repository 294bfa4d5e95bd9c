// AdamW as one operator over all parameters. The dozen operators per parameter of
// torch::optim::AdamW would outweigh a small model's own work.

#ifndef PINION_EXAMPLES_FUSED_ADAMW_H_
#define PINION_EXAMPLES_FUSED_ADAMW_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace pinion {

class FusedAdamW {
 public:
  // Allocates its state on the parameters' device.
  explicit FusedAdamW(std::vector<at::Tensor> parameters);

  // `step` counts from 1.
  void Step(const std::vector<at::Tensor>& gradients, int64_t step);

  const std::vector<at::Tensor>& means() const { return means_; }
  const std::vector<at::Tensor>& squares() const { return squares_; }

 private:
  std::vector<at::Tensor> parameters_, means_, squares_;
};

}  // namespace pinion

#endif  // PINION_EXAMPLES_FUSED_ADAMW_H_
