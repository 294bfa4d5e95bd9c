#include "pinion/tests/hooks/programs/training.h"

#include <ATen/Parallel.h>
#include <ATen/SequenceNumber.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/tests/hooks/support/autocast_region.h"

namespace pinion::testing {
namespace {

using at::Tensor;

std::unique_ptr<torch::optim::Optimizer> NewOptimizer(int kind,
                                                      const std::vector<Tensor>& trained) {
  constexpr double kRate = 0.01;
  if (kind == 2) return std::make_unique<torch::optim::Adam>(trained, kRate);
  return std::make_unique<torch::optim::SGD>(
      trained, torch::optim::SGDOptions(kRate).momentum(kind == 1 ? 0.9 : 0));
}

// Autograd adds up gradients in the order of their nodes' numbers, which each thread counts by
// itself. Those of forward stay ahead of those that a backward makes on its worker, so that equal
// programs add in equal order. Otherwise a checkpoint, whose recomputation makes more nodes on the
// worker, may change the order in a double backward (docs/users/checkpoints.md).
void StayAheadOfWorkers() {
  constexpr int kMoreThanABackwardMakes = 20000;
  for (int i = 0; i < kMoreThanABackwardMakes; ++i) at::sequence_number::get_and_increment();
}

// Adds the mean squares of the defined gradients.
void AddSquares(Tensor& sum, const std::vector<Tensor>& gradients) {
  for (const Tensor& gradient : gradients) {
    if (gradient.defined()) sum = sum + gradient.square().mean();
  }
}

// Halves an accumulated gradient.
struct Halve final : torch::autograd::PostAccumulateGradHook {
  void operator()(const Tensor& parameter) override {
    const at::NoGradGuard no_grad;
    parameter.mutable_grad().mul_(0.5);
  }
};

}  // namespace

Training::Training(const Program& program, const Mode& mode,
                   std::shared_ptr<EmulatedMachine> machine)
    : program_(program),
      limit_bytes_(mode.limit_bytes),
      limits_from_first_save_(mode.limits_from_first_save),
      machine_(std::move(machine)) {
  SeedFor(-1, 0, 0);
  net_ = std::make_unique<ProgramNet>(program, /*checkpoints=*/mode.offload);
  net_->set_after_operator([this] {
    if (!IsBeforeFirstSave()) LimitFromFirstSave();
  });
  net_->MoveBuffers(device_);
  const OffloadOptions options = OptionsOf(program, mode, machine_);
  if (mode.offload && program.session != 0) CreateSessions(options, mode);
  if (mode.offload && program.streams_weights != 0) {
    weights_ = WeightOffloader::Attach(*net_->module(), device_, EmulatedBackend(machine_),
                                       WeightOptionsOf(program, mode, options))
                   .value();
    trained_ = weights_->host_parameters();
  } else {
    net_->module()->to(device_);
    trained_ = net_->module()->parameters();
  }
  if (program.other_model != 0) CreateOtherModel(options, mode);
  heads_ = HeadsOf(program, net_->module()->parameters());
  optimizer_ = NewOptimizer(program.optimizer, trained_);
}

void Training::CreateSessions(const OffloadOptions& options, const Mode& mode) {
  const DeviceBackend backend = EmulatedBackend(machine_);
  std::shared_ptr<PinnedAllocator> pool;
  if (program_.host_is_full != 0) {
    host_ = std::make_unique<FakeHost>();
    SetHostRoom();
    pool = PinnedAllocator::Create(options.allocator, machine_->device(0)->pinned_source(),
                                   host_->Probe())
               .value();
  }
  sessions_.push_back(OffloadSession::Create(options, backend, pool).value());
  if (program_.other_session != 0 && program_.target != 2) {
    sessions_.push_back(
        OffloadSession::Create(OtherOptionsOf(program_, options), backend, pool).value());
  }
  // Measuring borrows device memory, which must not raise the least peak.
  const bool measures_first = program_.measured_link == 1 || mode.target_bytes == kLeastTarget;
  if (program_.measured_link == 0 || !measures_first) return;
  for (const auto& session : sessions_) PINION_CHECK(session->Reserve(0, 0).ok());
}

void Training::CreateOtherModel(const OffloadOptions& options, const Mode& mode) {
  constexpr int kMatrices = 3;
  const double scale = 1 / std::sqrt(static_cast<double>(program_.width));
  for (int i = 0; i < kMatrices; ++i) {
    other_model_->append(at::randn({program_.width, program_.width}) * scale);
  }
  if (mode.offload) {
    other_weights_ = WeightOffloader::Attach(*other_model_, device_, EmulatedBackend(machine_),
                                             WeightOptionsOf(program_, mode, options))
                         .value();
  } else {
    other_model_->to(device_);
  }
}

void Training::SetHostRoom() const {
  constexpr uint64_t kRam = 16 * kGiB;
  const bool is_full = step_ % 2 == program_.host_is_full - 1 && HasHostLimits(program_);
  host_->SetMeminfo(kRam, is_full ? 0 : kRam);
  // Without cached memory a full host refuses.
  if (is_full && !sessions_.empty()) PINION_CHECK(sessions_.front()->Trim(/*keep_bytes=*/0).ok());
}

std::string Training::place() const { return absl::StrCat("step ", step_, ", ", phase_); }

std::vector<Result> Training::Train() {
  for (step_ = 0; step_ < program_.steps; ++step_) {
    if (program_.IsFirstOddOfItsKind(step_)) {
      const uint64_t before = StepsOverTarget();
      WithoutLimit([this] { Step(); });
      excused_steps_over_ += StepsOverTarget() - before;
    } else {
      Step();
    }
  }
  for (size_t i = 0; i < trained_.size(); ++i) Keep("parameter", i, trained_[i]);
  if (!net_->GuardsHaveRun()) throw std::logic_error("a segment's guard has not run its operator");
  if (program_.late_parameter != 0) AddParameterTooLate();
  return std::move(results_);
}

// At most 64 steps of 8 micro-batches of 8 forwards.
void Training::SeedFor(int step, int micro_batch, int forward) const {
  const int place = ((step + 1) * 8 + micro_batch) * 8 + forward;
  at::manual_seed(static_cast<uint64_t>(program_.seed) * 4096 + static_cast<uint64_t>(place));
}

void Training::Keep(const char* what, size_t index, const Tensor& value) {
  results_.push_back({absl::StrCat("step ", step_, ": ", what, " ", index),
                      value.defined() ? value.detach().cpu().clone() : Tensor()});
}

void Training::BeginStep() {
  if (host_ != nullptr) SetHostRoom();
  std::vector<Tensor> parameters = net_->module()->parameters();
  if (program_.frozen != 0 && program_.thaws != 0 && step_ == program_.thaws) {
    parameters[static_cast<size_t>(program_.frozen)].requires_grad_(true);
  }
  if (program_.late_hooks == 0 || step_ + 1 != program_.late_hooks) return;
  for (const Tensor& parameter : parameters) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Halve>());
  }
}

void Training::Step() {
  BeginStep();
  for (int micro = 0; micro < program_.micro_batches; ++micro) MicroBatch(micro);
  Update();
}

void Training::WithoutLimit(absl::FunctionRef<void()> run) {
  if (!limit_bytes_.has_value() || is_limit_lifted_) return run();
  LiftLimit();
  run();
  RestoreLimit();
}

void Training::LiftLimit() {
  is_limit_lifted_ = true;
  PINION_CHECK(machine_->SetMemoryLimit(0, machine_->options().memory_bytes).ok());
}

void Training::RestoreLimit() {
  is_limit_lifted_ = false;
  PINION_CHECK(machine_->SynchronizeDevice(0).ok());
  PINION_CHECK(machine_->SetMemoryLimit(0, *limit_bytes_).ok());
  // Pinion bounds what it cannot observe by LibTorch's peak (docs/users/limits.md).
  machine_->ResetPeakMemory(0);
}

void Training::LimitFromFirstSave() {
  if (std::exchange(awaits_first_save_, false)) RestoreLimit();
}

uint64_t Training::StepsOverTarget() const {
  uint64_t steps = 0;
  for (const auto& session : sessions_) steps += session->GetStats().steps_over_target;
  return steps;
}

uint64_t Training::Packed() const {
  uint64_t packed = 0;
  for (const auto& session : sessions_) packed += session->GetStats().packed;
  return packed;
}

bool Training::IsBeforeFirstSave() const {
  return runs_forward_ && !sessions_.empty() && Packed() == packed_before_;
}

void Training::MicroBatch(int micro) {
  packed_before_ = Packed();
  runs_forward_ = true;
  awaits_first_save_ = limits_from_first_save_ && !is_limit_lifted_;
  if (awaits_first_save_) LiftLimit();
  StayAheadOfWorkers();
  struct Forward {
    Tensor input, loss;
    Registers results;
  };
  const bool is_short = step_ % 2 == 1 && program_.odd_steps_are_short != 0;
  const int64_t rows = is_short ? program_.rows / 2 : program_.rows;
  std::vector<Forward> forwards(static_cast<size_t>(program_.forwards));
  for (size_t i = 0; i < forwards.size(); ++i) {
    phase_ = "forward";
    SeedFor(step_, micro, static_cast<int>(i));
    Forward& forward = forwards[i];
    forward.input = at::randn({rows, program_.width}).to(device_);
    if (program_.input_requires_grad != 0) forward.input.requires_grad_(true);
    if (program_.other_model == 1) Score(forward.input);
    forward.loss =
        ForwardInScope(forward.input, program_.holds_results ? &forward.results : nullptr);
    if (program_.loss_behind) forward.loss = forward.loss + NothingOfMuch(rows);
    if (program_.MeasuresAfterForward(step_)) net_->Measure(forward.input);
    if (program_.odd_steps_measure != 0) Keep("metrics", 0, at::scalar_tensor(net_->metrics()));
    if (program_.other_model == 2) Score(forward.input);
  }
  if (program_.newest_first) std::reverse(forwards.begin(), forwards.end());
  if (program_.swaps_weights != 0 && program_.streams_weights == 0) SwapWeights();
  phase_ = "backward";
  runs_forward_ = false;
  LimitFromFirstSave();
  for (Forward& forward : forwards) {
    Backward(forward.loss);
    Keep("loss", 0, forward.loss);
    if (forward.input.grad().defined()) Keep("gradient of the input", 0, forward.input.grad());
    forward.input.mutable_grad() = Tensor();  // its graph may hold the input
    forward = {};
  }
}

Tensor Training::ForwardInScope(const Tensor& input, Registers* results) {
  std::unique_ptr<OffloadScope> scope = NewScope();
  std::unique_ptr<OffloadScope> inner = program_.scopes_end == 1 ? NewScope() : nullptr;
  Tensor loss;
  {
    std::optional<AutocastRegion> autocast;
    if (program_.autocast != 0) autocast.emplace(device_.type());
    loss = net_->Loss(input, step_, results);
  }
  if (program_.scopes_end == 2) std::thread([&scope] { scope.reset(); }).join();
  scope.reset();
  inner.reset();
  if (CurrentPacker() != nullptr) throw std::logic_error("a scope that has ended packs on");
  return loss;
}

std::unique_ptr<OffloadScope> Training::NewScope() {
  if (sessions_.empty()) return nullptr;
  const std::shared_ptr<OffloadSession>& session = sessions_[scopes_++ % sessions_.size()];
  const torch::nn::Module without_parameters;
  const torch::nn::Module& module =
      program_.scope_has_module == 2 ? without_parameters : *net_->module();
  if (!heads_.parts.empty()) return std::make_unique<OffloadScope>(session, module, heads_);
  if (program_.scope_has_module == 0) return std::make_unique<OffloadScope>(session);
  return std::make_unique<OffloadScope>(session, module);
}

// Returns zero, using temporary memory and saving nothing.
Tensor Training::NothingOfMuch(int64_t rows) const {
  const at::NoGradGuard no_grad;
  return (at::ones({rows, 4 * program_.width}, device_).exp() * 0).sum();
}

// Keeps the other model's result for the input, in every fourth step.
void Training::Score(const Tensor& input) {
  if (!Program::IsFourth(step_)) return;
  const at::NoGradGuard no_grad;
  Tensor score = input;
  for (const Tensor& matrix : other_model_->parameters()) score = at::linear(score, matrix).tanh();
  Keep("score", 0, score);
}

// Tensors saved without a copy have other bytes from here on.
void Training::SwapWeights() const {
  const at::NoGradGuard no_grad;
  for (const Tensor& parameter : net_->module()->parameters()) parameter.set_data(parameter * 0.75);
}

void Training::Backward(Tensor loss) const {
  const std::vector<Tensor> parameters = net_->module()->parameters();
  if (program_.create_graph == 1 || (program_.create_graph == 2 && step_ % 2 == 1)) {
    std::vector<Tensor> trained;
    std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(trained),
                 [](const Tensor& parameter) { return parameter.requires_grad(); });
    Tensor penalty = at::zeros({}, loss.options());
    AddSquares(penalty, torch::autograd::grad({loss}, trained, {}, /*retain_graph=*/true,
                                              /*create_graph=*/true, /*allow_unused=*/true));
    loss = loss + penalty;
  }
  const bool makes_graph = program_.create_graph == 3;
  for (int left = program_.backwards - 1; left >= 0; --left) {
    RunEngine(loss, /*keeps_graph=*/left > 0 || makes_graph, makes_graph);
  }
  if (!makes_graph) return;
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  Tensor penalty = at::zeros({}, loss.options());
  AddSquares(penalty, gradients);
  RunEngine(penalty, /*keeps_graph=*/false, /*makes_graph=*/false);
}

void Training::RunEngine(const Tensor& loss, bool keeps_graph, bool makes_graph) const {
  namespace autograd = torch::autograd;
  if (program_.engine == 0) {
    loss.backward({}, keeps_graph, makes_graph);
  } else if (program_.engine == 1) {  // as Python does
    autograd::Engine::get_base_engine().execute({autograd::impl::gradient_edge(loss)},
                                                {at::ones_like(loss)}, keeps_graph, makes_graph,
                                                /*accumulate_grad=*/true, {});
  } else {
    std::exception_ptr error;
    std::thread([&] {
      at::init_num_threads();
      try {
        loss.backward({}, keeps_graph, makes_graph);
      } catch (...) {
        error = std::current_exception();
      }
    }).join();
    if (error != nullptr) std::rethrow_exception(error);
  }
}

void Training::Update() {
  phase_ = "update";
  if (weights_ != nullptr) weights_->WaitForGradients();
  for (size_t i = 0; i < trained_.size(); ++i) {
    Keep("gradient", i, trained_[i].grad());
    const std::optional<c10::ScalarType> type = trained_[i].grad_dtype();
    if (type.has_value()) Keep("type of gradient", i, at::scalar_tensor(static_cast<int>(*type)));
  }
  const auto step = [this] { optimizer_->step(); };
  if (weights_ != nullptr) {
    weights_->Step(step);
  } else if (program_.other_model != 0) {
    WithoutLimit(step);  // nothing makes the other model's idle weights give way to the optimizer
  } else {
    step();
  }
  // As WeightOffloader::ZeroGrad does: a gradient of -0 that is added to zeros becomes +0.
  const bool to_none = program_.streams_weights != 0 || program_.zero_gradients_stay == 0;
  if (program_.module_zero_grad != 0) {
    net_->module()->zero_grad(to_none);
  } else if (weights_ != nullptr) {
    weights_->ZeroGrad();
  } else {
    optimizer_->zero_grad(to_none);
  }
}

void Training::AddParameterTooLate() {
  if (weights_ == nullptr) return;
  net_->module()->append(at::zeros({1}, device_).requires_grad_(true));
  try {
    weights_->WaitForGradients();
  } catch (const c10::Error& error) {
    if (absl::StrContains(error.what(), "came to the module after WeightOffloader::Attach")) return;
    throw;
  }
  throw std::logic_error("a parameter without a host copy was not refused");
}

}  // namespace pinion::testing
