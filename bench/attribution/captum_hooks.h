// Captum's forward hooks and its reduction of their results, for taps (hooks/attribution/tap.h).
//
// Thread safety: none.

#ifndef PINION_BENCH_ATTRIBUTION_CAPTUM_HOOKS_H_
#define PINION_BENCH_ATTRIBUTION_CAPTUM_HOOKS_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "pinion/hooks/attribution/tap.h"

namespace pinion {

// Forward hooks of layers with one tensor each.
class CaptumHooks final : public TapListener {
 public:
  enum class Saves { kRawAndGoesOnWithClones, kClones };

  // `layers` outlives it.
  CaptumHooks(const std::vector<std::string>& layers, Saves saves)
      : layers_(layers), saves_(saves) {}

  std::vector<at::Tensor> OnTap(std::string_view name, std::vector<at::Tensor> tensors) override {
    if (std::find(layers_.begin(), layers_.end(), name) == layers_.end()) return tensors;
    at::Tensor& saved = saved_[std::string(name)];
    if (saves_ == Saves::kClones) {
      saved = tensors.front().clone();
      return tensors;
    }
    saved = tensors.front();
    if (!saved.requires_grad()) saved.requires_grad_();
    return {saved.clone()};
  }

  // Returns the saved tensors by layer.
  std::vector<at::Tensor> TakeSaved() {
    std::vector<at::Tensor> saved;
    for (const std::string& layer : layers_) saved.push_back(saved_.at(layer));
    saved_.clear();
    return saved;
  }

 private:
  const std::vector<std::string>& layers_;
  const Saves saves_;
  std::map<std::string, at::Tensor> saved_;
};

// Captum's reduction over devices. With one device, cat still copies.
inline at::Tensor CaptumReduce(const at::Tensor& tensor) { return at::cat({tensor}); }

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_CAPTUM_HOOKS_H_
