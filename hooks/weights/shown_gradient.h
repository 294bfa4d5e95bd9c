// A tensor that shows a streamed weight's gradient and has no memory of its own. It is the grad()
// of the parameter, and that of the host copy while a part of the gradient is under copy.
//
//   auto shown = std::make_shared<ShownGradient>(gradients, index);
//   parameter.mutable_grad() = shown->Tensor(master, dtype, parameter.device());
//
// Backward adds to the gradient without fetching it (aten::add_), and zero_() sets the host's
// gradient to zero. For other operators the value is copied to the tensor's device while the
// operator runs, and written values are copied back. After zero_grad() grad() is another tensor.
//
// Thread safety: one operator at a time.

#ifndef PINION_HOOKS_WEIGHTS_SHOWN_GRADIENT_H_
#define PINION_HOOKS_WEIGHTS_SHOWN_GRADIENT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "pinion/hooks/weights/streamed_tensor.h"

namespace pinion {

class HostGradients;

class ShownGradient final : public ResidencyKeeper {
 public:
  ShownGradient(std::weak_ptr<HostGradients> gradients, size_t index)
      : gradients_(std::move(gradients)), index_(index) {}

  // Returns the tensor, with the shape of the host copy. Called once.
  at::Tensor Tensor(const at::Tensor& master, c10::ScalarType type, c10::Device device);
  // Whether `grad` is the tensor or a view of it.
  bool IsShownBy(const at::Tensor& grad) const { return KeeperOf(grad) == this; }

  // These throw, and name the weight, if the gradient was reset or replaced.
  void Enter(uint32_t unit, uint64_t argument_bytes) override;
  void Leave(uint32_t unit) override;
  bool Write(uint32_t unit, const WritingOperator& op) override;
  void OnWritten(uint32_t unit) override;

 private:
  std::shared_ptr<HostGradients> Owner() const;
  at::Tensor Value() const;

  const std::weak_ptr<HostGradients> gradients_;
  const size_t index_;
  at::Tensor like_;  // on the meta device
  std::optional<c10::Device> device_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_{c10::intrusive_ptr<c10::StorageImpl>()};
  at::Tensor here_;  // the value on the device, while an operator runs
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_SHOWN_GRADIENT_H_
