#include "pinion/hooks/weights/weight_units.h"

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_set.h"

namespace pinion {
namespace {

constexpr uint64_t kMinBufferBytes = 1 << 20;

class UnitFinder {
 public:
  void Visit(const torch::nn::Module& module, const std::string& name) {
    AddLayer(module, name, /*recurse=*/false);
    const bool is_row = module.as<torch::nn::SequentialImpl>() != nullptr ||
                        module.as<torch::nn::ModuleListImpl>() != nullptr;
    for (const auto& child : module.named_children()) {
      const std::string child_name = name.empty() ? child.key() : name + "." + child.key();
      if (is_row) {
        AddLayer(*child.value(), child_name, /*recurse=*/true);
      } else {
        Visit(*child.value(), child_name);
      }
    }
  }
  std::vector<WeightUnit> Take() { return std::move(units_); }

 private:
  void AddLayer(const torch::nn::Module& module, const std::string& name, bool recurse) {
    WeightUnit trained = {.name = name, .requires_grad = true, .weights = {}};
    WeightUnit frozen = {.name = name, .requires_grad = false, .weights = {}};
    const auto add = [&](WeightUnit& unit, const std::string& key, const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.numel() == 0) return;
      if (!seen_.insert(tensor.unsafeGetTensorImpl()).second) return;
      unit.weights.push_back({name.empty() ? key : name + "." + key, tensor});
    };
    for (const auto& parameter : module.named_parameters(recurse)) {
      WeightUnit& unit = parameter.value().requires_grad() ? trained : frozen;
      add(unit, parameter.key(), parameter.value());
    }
    for (const auto& buffer : module.named_buffers(recurse)) {
      if (buffer.value().nbytes() >= kMinBufferBytes) add(frozen, buffer.key(), buffer.value());
    }
    for (WeightUnit* unit : {&trained, &frozen}) {
      if (!unit->weights.empty()) units_.push_back(std::move(*unit));
    }
  }

  std::vector<WeightUnit> units_;
  absl::flat_hash_set<const c10::TensorImpl*> seen_;
};

}  // namespace

std::vector<WeightUnit> WeightUnitsOf(const torch::nn::Module& module) {
  UnitFinder finder;
  finder.Visit(module, "");
  return finder.Take();
}

}  // namespace pinion
