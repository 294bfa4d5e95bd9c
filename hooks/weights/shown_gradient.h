// A streamed weight's gradient as a tensor, wherever its bytes are: what the parameter's grad() is
// on the device, and what the host copy's is while some of it is on its way there.
//
//   auto shown = std::make_shared<ShownGradient>(gradients, index);
//   parameter.mutable_grad() = shown->Tensor(master, dtype, parameter.device());
//
// Backward adds to it without bringing it (aten::add_). zero_() sets the host's copy to zero. Any
// other operator gets the value, copied to the tensor's device for as long as it runs, and what it
// writes is copied back. That grad() does not have it any more is how zero_grad() is noticed.
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

#include "pinion/hooks/weights/visiting_tensor.h"

namespace pinion {

class HostGradients;

class ShownGradient final : public VisitKeeper {
 public:
  ShownGradient(std::weak_ptr<HostGradients> gradients, size_t index)
      : gradients_(std::move(gradients)), index_(index) {}

  // Once. Of the shape of the weight's host copy.
  at::Tensor Tensor(const at::Tensor& master, c10::ScalarType type, c10::Device device);
  // grad() is that tensor, or a view of it.
  bool IsShownBy(const at::Tensor& grad) const { return KeeperOf(grad) == this; }

  // Throw, and name the weight, where the gradient is none any more.
  void Enter(uint32_t unit, uint64_t argument_bytes) override;
  void Leave(uint32_t unit) override;
  bool Write(uint32_t unit, const WritingOperator& op) override;
  void OnWritten(uint32_t unit) override;

 private:
  std::shared_ptr<HostGradients> Owner() const;
  at::Tensor Value() const;

  const std::weak_ptr<HostGradients> gradients_;
  const size_t index_;
  at::Tensor like_;  // without bytes
  std::optional<c10::Device> device_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_{c10::intrusive_ptr<c10::StorageImpl>()};
  at::Tensor here_;  // while an operator runs
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_SHOWN_GRADIENT_H_
