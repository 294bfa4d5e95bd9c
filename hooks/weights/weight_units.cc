#include "pinion/hooks/weights/weight_units.h"

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"

namespace pinion {
namespace {

constexpr uint64_t kMinBufferBytes = 1 << 20;

// Whether a buffer is a running statistic of normalisation, which each training forward changes.
bool IsStatistic(const std::string& key) {
  return absl::EndsWith(key, "running_mean") || absl::EndsWith(key, "running_var");
}

class UnitFinder {
 public:
  void Visit(const torch::nn::Module& module, const std::string& name) {
    if (module.as<torch::nn::ParameterListImpl>() != nullptr) {
      for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
        const std::string key = NameIn(name, parameter.key());
        WeightUnit unit = {
            .name = key, .requires_grad = parameter.value().requires_grad(), .weights = {}};
        Add(unit, key, parameter.value());
        Keep(std::move(unit));
      }
      return;
    }
    AddLayer(module, name, /*recurse=*/false);
    const bool is_row = module.as<torch::nn::SequentialImpl>() != nullptr ||
                        module.as<torch::nn::ModuleListImpl>() != nullptr;
    for (const auto& child : module.named_children()) {
      const std::string child_name = NameIn(name, child.key());
      if (is_row) {
        AddLayer(*child.value(), child_name, /*recurse=*/true);
      } else {
        Visit(*child.value(), child_name);
      }
    }
  }
  std::vector<WeightUnit> Take() { return std::move(units_); }

 private:
  static std::string NameIn(const std::string& parent, const std::string& key) {
    return parent.empty() ? key : parent + "." + key;
  }
  void Add(WeightUnit& unit, const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.numel() == 0) return;
    if (!seen_.insert(tensor.unsafeGetTensorImpl()).second) return;
    unit.weights.push_back({name, tensor});
  }
  void Keep(WeightUnit unit) {
    if (!unit.weights.empty()) units_.push_back(std::move(unit));
  }
  void AddLayer(const torch::nn::Module& module, const std::string& name, bool recurse) {
    WeightUnit trained = {.name = name, .requires_grad = true, .weights = {}};
    WeightUnit frozen = {.name = name, .requires_grad = false, .weights = {}};
    for (const auto& parameter : module.named_parameters(recurse)) {
      WeightUnit& unit = parameter.value().requires_grad() ? trained : frozen;
      Add(unit, NameIn(name, parameter.key()), parameter.value());
    }
    for (const auto& buffer : module.named_buffers(recurse)) {
      if (buffer.value().nbytes() < kMinBufferBytes || IsStatistic(buffer.key())) continue;
      Add(frozen, NameIn(name, buffer.key()), buffer.value());
    }
    Keep(std::move(trained));
    Keep(std::move(frozen));
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
