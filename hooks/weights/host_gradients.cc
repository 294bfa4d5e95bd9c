#include "pinion/hooks/weights/host_gradients.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/utils/clip_grad.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "pinion/device/host_arithmetic.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {
namespace {

namespace autograd = torch::autograd;

// Also runs the program's hook, since LibTorch has room for a single one. The program's hook finds
// the same grad() as the program after backward.
class CollectGradient final : public autograd::PostAccumulateGradHook {
 public:
  CollectGradient(std::shared_ptr<HostGradients> gradients, size_t index,
                  std::unique_ptr<autograd::PostAccumulateGradHook> next)
      : gradients_(std::move(gradients)), index_(index), next_(std::move(next)) {}
  void operator()(const at::Tensor& parameter) override {
    gradients_->Collect(index_, parameter);
    if (next_ != nullptr) (*next_)(parameter);
  }
  bool is_alone() const { return next_ == nullptr; }

 private:
  const std::shared_ptr<HostGradients> gradients_;
  const size_t index_;
  const std::unique_ptr<autograd::PostAccumulateGradHook> next_;
};

// Whether the program has a gradient, or another view of it, elsewhere. Backward detaches the
// gradients that it makes, which therefore are no views.
bool IsKept(const at::Tensor& grad) {
  if (!grad.is_view()) return grad.use_count() > 1;
  return grad.use_count() > 1 || grad._base().use_count() > 1 || grad.storage().use_count() > 2;
}

void CheckFollows(bool follows, const std::string& name) {
  TORCH_CHECK(follows, "grad() of ", name,
              " was set to a tensor that the program keeps, and that tensor has changed since, "
              "which the host's gradient does not follow: set a clone(), change grad() itself, or "
              "set a tensor of the host as host_parameters()[i].mutable_grad()");
}

at::Tensor Dense(const at::Tensor& gradient) {
  const at::Tensor plain = gradient.resolve_conj().resolve_neg();
  return plain.is_non_overlapping_and_dense() ? plain : plain.contiguous();
}

}  // namespace

HostGradients::HostGradients(std::shared_ptr<DeviceTier> tier, std::vector<StreamedWeight> weights,
                             size_t most_leaving, bool stay)
    : stay_(stay),
      leaving_(std::move(tier), most_leaving,
               [this](size_t index, uint32_t epoch, const at::Tensor& arrived) {
                 OnArrived(index, epoch, arrived);
               }) {
  for (StreamedWeight& weight : weights) {
    in_unit_.resize(std::max<size_t>(in_unit_.size(), weight.unit + 1));
    const bool requires_grad = weight.master.requires_grad();
    in_unit_[weight.unit] += requires_grad ? 1 : 0;
    weights_.push_back({std::move(weight), requires_grad});
  }
}

HostGradients::~HostGradients() {
  for (const Weight& weight : weights_) {
    if (weight.on_host != nullptr && HostShows(weight)) weight.master.mutable_grad() = weight.sum;
  }
}

void HostGradients::Begin() {
  for (size_t index = 0; index < weights_.size(); ++index) {
    const at::Tensor parameter = ParameterOf(weights_[index]);
    SetHook(index, parameter);
    const at::Tensor grad = std::exchange(parameter.mutable_grad(), at::Tensor());
    // The host copy has taken over a gradient that was on the host.
    if (grad.defined() && !grad.is_same(weights_[index].master.grad())) {
      Watch(weights_[index], grad.unsafeGetTensorImpl()->version_counter());
    }
    ShowInParameter(index, parameter);
  }
}

at::Tensor HostGradients::ParameterOf(const Weight& weight) const {
  return at::Tensor(weight.parameter.lock());
}

void HostGradients::SetHook(size_t index, const at::Tensor& parameter) {
  autograd::impl::materialize_autograd_meta(parameter);
  std::unique_ptr<autograd::PostAccumulateGradHook>& hook =
      autograd::impl::post_acc_grad_hooks(parameter);
  if (dynamic_cast<const CollectGradient*>(hook.get()) != nullptr) return;
  hook = std::make_unique<CollectGradient>(shared_from_this(), index, std::move(hook));
}

// --------------------------------------------------------------------------- what grad() shows

at::Tensor HostGradients::Show(size_t index, std::shared_ptr<ShownGradient>& shown,
                               c10::ScalarType type, c10::Device device) {
  shown = std::make_shared<ShownGradient>(weak_from_this(), index);
  return shown->Tensor(weights_[index].master, type, device);
}

void HostGradients::ShowInParameter(size_t index, const at::Tensor& parameter) {
  Weight& weight = weights_[index];
  const at::Tensor& on_host = weight.master.grad();
  if (!on_host.defined()) return;
  parameter.mutable_grad() =
      Show(index, weight.in_parameter, on_host.scalar_type(), parameter.device());
}

bool HostGradients::HostShows(const Weight& weight) const {
  return weight.on_host->IsShownBy(weight.master.grad());
}

bool HostGradients::Shows(size_t index, const ShownGradient& shown) const {
  const Weight& weight = weights_[index];
  return &shown == weight.in_parameter.get() || &shown == weight.on_host.get();
}

bool HostGradients::IsAccumulating(size_t index) const {
  const auto node = autograd::get_current_node();
  const auto* const accumulating = dynamic_cast<const autograd::AccumulateGrad*>(node.get());
  if (accumulating == nullptr) return false;
  const at::Tensor& parameter = accumulating->variable;
  const auto* const hook =
      dynamic_cast<const CollectGradient*>(autograd::impl::post_acc_grad_hooks(parameter).get());
  return hook != nullptr && hook->is_alone() && parameter.is_same(ParameterOf(weights_[index]));
}

at::Tensor HostGradients::Value(size_t index) {
  Arrive();
  const Weight& weight = weights_[index];
  if (weight.on_host == nullptr || !HostShows(weight)) return weight.master.grad();
  return weight.has_graph ? ParameterOf(weight).grad().detach() : weight.sum;
}

void HostGradients::Zero(size_t index) {
  const at::Tensor value = Value(index);
  if (value.defined()) value.zero_();
}

void HostGradients::Forget(Weight& weight) {
  ++weight.epoch;
  weight.has_graph = false;
  weight.kept.reset();
  weight.given = {};
  weight.in_parameter.reset();
  weight.on_host.reset();
  weight.sum.reset();
  weight.staying.reset();
  weight.master.mutable_grad() = at::Tensor();
}

// ------------------------------------------------------------------------------- from parameters

void HostGradients::ForgetZeroed() {
  const int64_t backward = CurrentBackward();
  if (std::exchange(backward_, backward) == backward) return;
  for (Weight& weight : weights_) {
    const at::Tensor parameter = ParameterOf(weight);
    if (weight.in_parameter == nullptr || !parameter.defined()) continue;
    at::Tensor& grad = parameter.mutable_grad();
    if (grad.defined() && weight.master.grad().defined()) continue;
    if (weight.in_parameter->IsShownBy(grad)) grad = at::Tensor();
    if (!grad.defined()) Forget(weight);
  }
}

void HostGradients::Collect(size_t index, const at::Tensor& parameter) {
  ForgetZeroed();
  TakeGrad(index, parameter, /*in_backward=*/true);
  weights_[index].watch->NoteGradient();
}

void HostGradients::Watch(Weight& weight, const c10::VariableVersion& given) {
  weight.given = given;
  weight.given_version = given.enabled() ? given.current_version() : 0;
}

void HostGradients::TakeGrad(size_t index, const at::Tensor& parameter, bool in_backward) {
  Weight& weight = weights_[index];
  at::Tensor& grad = parameter.mutable_grad();
  if (weight.in_parameter != nullptr && weight.in_parameter->IsShownBy(grad)) {
    CheckFollows(in_backward || !weight.given.enabled() || !weight.master.grad().defined() ||
                     weight.given.current_version() == weight.given_version,
                 weight.name);
    return;
  }
  const bool has_graph = grad.defined() && grad.requires_grad();
  const bool host_forgot = weight.has_graph && !HostShows(weight);
  if (has_graph && in_backward) {
    TORCH_CHECK(!host_forgot, "the gradient of ", weight.name,
                " has a graph, by create_graph, and was forgotten on the host alone: call "
                "WeightOffloader::ZeroGrad, or the module's zero_grad()");
    if (!weight.has_graph) BeginLeaving(index, grad);
    weight.has_graph = true;
    return;
  }
  const bool was_kept =
      weight.kept.has_value() && weight.kept->_unsafe_get_target() == grad.unsafeGetTensorImpl();
  const bool is_kept = grad.defined() && (in_backward || was_kept) && IsKept(grad);
  CheckFollows(in_backward || !is_kept, weight.name);
  weight.kept.reset();
  if (is_kept) {
    weight.kept.emplace(grad.getIntrusivePtr());
    return;
  }
  if (weight.in_parameter != nullptr || weight.has_graph) Forget(weight);
  if (has_graph && host_forgot) grad = at::Tensor();
  if (!grad.defined()) return;
  const c10::VariableVersion given = grad.unsafeGetTensorImpl()->version_counter();
  const at::Tensor taken = std::exchange(grad, at::Tensor()).detach().to(parameter.device());
  Add(index, taken);
  if (!in_backward) Watch(weight, given);
  ShowInParameter(index, parameter);  // in the type of the sum, which the host may have had
}

void HostGradients::FollowRequiresGrad(Weight& weight, const at::Tensor& parameter) {
  const bool requires_grad = parameter.requires_grad();
  const bool on_host = weight.master.requires_grad();
  TORCH_CHECK(on_host == requires_grad || on_host == weight.requires_grad, "requires_grad of ",
              weight.name, " was set to ", on_host, " in host_parameters() and is ", requires_grad,
              " in the module: set it there, which the host's copy follows");
  if (requires_grad != weight.requires_grad) in_unit_[weight.unit] += requires_grad ? 1 : -1;
  weight.requires_grad = requires_grad;
  weight.master.set_requires_grad(requires_grad);
}

void HostGradients::Follow() {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  for (size_t index = 0; index < weights_.size(); ++index) {
    Weight& weight = weights_[index];
    const at::Tensor parameter = ParameterOf(weight);
    if (!parameter.defined()) continue;
    SetHook(index, parameter);
    TakeGrad(index, parameter, /*in_backward=*/false);
    FollowRequiresGrad(weight, parameter);
  }
  Arrive();
  for (size_t index = 0; index < weights_.size(); ++index) {
    Weight& weight = weights_[index];
    Publish(weight);
    if (weight.master.grad().defined()) weight.watch->NoteGradient();
    const at::Tensor parameter = ParameterOf(weight);
    if (!parameter.defined()) continue;
    if (!weight.master.grad().defined() && weight.in_parameter != nullptr) {
      parameter.mutable_grad() = at::Tensor();
      Forget(weight);
    } else if (weight.in_parameter == nullptr) {
      ShowInParameter(index, parameter);
    }
    const std::optional<c10::ScalarType> type = parameter.grad_dtype();
    if (weight.master.grad_dtype() != type) weight.master.set_grad_dtype(type);
  }
}

// ------------------------------------------------------------------------------------ to the host

void HostGradients::BeginLeaving(size_t index, const at::Tensor& gradient) {
  Weight& weight = weights_[index];
  if (weight.on_host != nullptr) {
    if (HostShows(weight)) return;
    // Reset on the host alone: the parameter goes on showing later gradients.
    const std::shared_ptr<ShownGradient> in_parameter = weight.in_parameter;
    const at::Tensor instead = weight.master.grad();
    Forget(weight);
    weight.in_parameter = in_parameter;
    weight.master.mutable_grad() = instead;
  }
  weight.sum = std::exchange(weight.master.mutable_grad(), at::Tensor());
  if (!weight.sum.defined()) weight.given = {};
  const at::Tensor& like = weight.sum.defined() ? weight.sum : gradient;
  weight.master.mutable_grad() =
      Show(index, weight.on_host, like.scalar_type(), weight.master.device());
}

void HostGradients::Add(size_t index, const at::Tensor& gradient) {
  // A dense copy would change what an optimizer for sparse gradients does.
  TORCH_CHECK(gradient.layout() == at::kStrided, "the gradient of ", weights_[index].name, " is ",
              gradient.layout(),
              ", and the host has dense gradients of streamed weights: make its embedding with "
              "sparse=false");
  const at::NoGradGuard no_grad;
  BeginLeaving(index, gradient);
  Weight& weight = weights_[index];
  const at::Tensor dense = Dense(gradient);
  if (!stay_) {
    leaving_.Put({index, weight.unit, weight.epoch, dense}, in_unit_[weight.unit]);
  } else if (weight.staying.defined()) {
    weight.staying.add_(dense);
  } else {
    // Other parameters' gradients may be views of the same memory.
    weight.staying = dense.storage().use_count() > 1 ? dense.clone() : dense;
  }
}

void HostGradients::Arrive() {
  for (size_t index = 0; stay_ && index < weights_.size(); ++index) {
    Weight& weight = weights_[index];
    if (!weight.staying.defined()) continue;
    leaving_.Put({index, weight.unit, weight.epoch, std::exchange(weight.staying, at::Tensor())},
                 in_unit_[weight.unit]);
  }
  leaving_.Settle();
}

void HostGradients::OnArrived(size_t index, uint32_t epoch, const at::Tensor& arrived) {
  Weight& weight = weights_[index];
  if (epoch != weight.epoch) return;
  if (!weight.sum.defined()) {
    weight.sum = arrived;
    return;
  }
  const at::NoGradGuard no_grad;
  weight.sum.add_(arrived);
  CountHostArithmetic(3 * arrived.nbytes());
}

void HostGradients::Publish(Weight& weight) {
  if (weight.on_host == nullptr) return;
  if (HostShows(weight)) weight.master.mutable_grad() = weight.sum;
  ++weight.epoch;
  weight.on_host.reset();
  weight.sum.reset();
}

double HostGradients::ClipNorm(double max_norm) {
  std::vector<at::Tensor> masters;
  for (const Weight& weight : weights_) {
    if (!weight.master.grad().defined()) continue;
    masters.push_back(weight.master);
    // The norm reads each gradient. Scaling reads and writes it.
    CountHostArithmetic(3 * weight.master.nbytes());
  }
  return torch::nn::utils::clip_grad_norm_(masters, max_norm);
}

void HostGradients::Zero() {
  Arrive();
  for (Weight& weight : weights_) {
    Forget(weight);
    const at::Tensor parameter = ParameterOf(weight);
    if (parameter.defined()) parameter.mutable_grad() = at::Tensor();
  }
}

}  // namespace pinion
