#include "pinion/hooks/activations/scope_packer.h"

#include <utility>

#include "pinion/hooks/autograd/kept_tensor.h"

namespace pinion {

ScopePacker::ScopePacker(std::shared_ptr<PackTarget> target, ParameterStorages parameters,
                         std::shared_ptr<PackScope> scope)
    : target_(std::move(target)), parameters_(std::move(parameters)), scope_(std::move(scope)) {}

std::unique_ptr<SavedTensor> ScopePacker::Pack(const at::Tensor& tensor, const GraphPlace& place) {
  HostTimer timer(target_->stats());
  timer.Count(&OffloadStats::packed);
  std::unique_ptr<SavedTensor> saved = target_->Pack(tensor, place, parameters_, *scope_);
  return saved == nullptr ? KeepTensor(tensor) : std::move(saved);
}

}  // namespace pinion
