#include "pinion/hooks/attribution/passes.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/device/host_arithmetic.h"
#include "pinion/hooks/autograd/memory_observer.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

// The allocator rounds each tensor up, so memory is not quite proportional to the rows.
constexpr double kRoomForRows = 63.0 / 64;

// A much larger pass may use other kernels and other allocator blocks.
constexpr double kGrowth = 8;

// Records each device's allocated bytes during a pass.
class PassPeaks final : public MemoryObserver {
 public:
  struct Device {
    bool is_used = false;
    int64_t least_bytes = 0;
    int64_t peak_bytes = 0;
  };

  PassPeaks(c10::DeviceType type, size_t devices) : type_(type), devices_(devices) {}

  void OnDeviceBytes(c10::Device device, int64_t allocated_bytes, int64_t, const void*) override {
    if (device.type() != type_) return;
    const MutexLock lock(mu_);
    Device& of = devices_.at(static_cast<size_t>(device.index()));
    of.least_bytes = of.is_used ? std::min(of.least_bytes, allocated_bytes) : allocated_bytes;
    of.peak_bytes = std::max(of.peak_bytes, allocated_bytes);
    of.is_used = true;
  }

  std::vector<Device> devices() const {
    const MutexLock lock(mu_);
    return devices_;
  }

 private:
  const c10::DeviceType type_;
  mutable Mutex mu_;
  std::vector<Device> devices_ ABSL_GUARDED_BY(mu_);
};

at::Tensor ExamplesOf(const at::Tensor& tensor, const PassRows& rows) {
  return tensor.narrow(0, rows.first_example, rows.examples);
}

// Returns the examples at each step, in a copy, which a forward function may change in place.
at::Tensor RepeatExamples(const at::Tensor& tensor, const PassRows& rows) {
  std::vector<int64_t> repeats(static_cast<size_t>(tensor.dim()), 1);
  repeats.front() = rows.steps;
  return ExamplesOf(tensor, rows).repeat(repeats);
}

// A few float32 blocks of this size fit into a core's cache.
constexpr int64_t kBlockElements = 64 * 1024;

}  // namespace

// Sizes the passes of a batched method to fit a device-memory budget, in place of a batch size that
// the user has to guess. It learns from the memory peaks of earlier passes, which LibTorch's
// allocators report (hooks/autograd/memory_observer.h) for this thread and its backward passes.
//
// The first pass has one example and the fewest steps. The memory that a pass adds grows at most in
// proportion to its rows, so the peaks bound the next pass. A pass has at most 8 times the observed
// rows and leaves 1/64 of the headroom for rounding. Memory held for the previous pass's copies
// counts. A pass that exceeds the budget is logged, and later passes are smaller.
class PassBudget {
 public:
  PassBudget(uint64_t budget_bytes, c10::DeviceType type)
      : budget_bytes_(std::min<uint64_t>(budget_bytes, INT64_MAX)), type_(type) {
    if (!has_bound()) return;
    TORCH_CHECK(type != c10::DeviceType::CPU && TellsAllocatedBytes(type),
                "device_budget_bytes is ", budget_bytes, ", but the allocator of \"",
                c10::DeviceTypeName(type, /*lower_case=*/true),
                "\" does not report allocated bytes: leave device_budget_bytes at 0");
    const c10::impl::VirtualGuardImpl guard(type);
    for (int index = 0; index < guard.deviceCount(); ++index) {
      held_bytes_.push_back(AllocatedBytes({type, static_cast<c10::DeviceIndex>(index)}));
    }
    const int64_t least_bytes = *std::min_element(held_bytes_.begin(), held_bytes_.end());
    TORCH_CHECK_WITH(OutOfMemoryError, least_bytes < static_cast<int64_t>(budget_bytes_),
                     "each device holds ", least_bytes,
                     " bytes or more before the first pass, and the budget is ", budget_bytes,
                     ": raise device_budget_bytes, or free some device memory");
  }

  // Return the examples and the steps of the next pass. `left` and the results are positive.
  int64_t Examples(int64_t left) const {
    if (!has_bound()) return left;
    double examples = 1;
    for (const Observed& observed : observed_) {
      examples = std::max(examples, MostRows(observed) / observed.steps);
    }
    return std::min(left, static_cast<int64_t>(examples));
  }
  int64_t Steps(int64_t examples, int64_t left, int64_t least_steps) const {
    if (!has_bound()) return left;
    auto steps = static_cast<double>(least_steps);
    for (const Observed& observed : observed_) {
      const double can = MostRows(observed) / static_cast<double>(examples);
      if (can >= observed.steps) steps = std::max(steps, can);
    }
    return std::min(left, static_cast<int64_t>(steps));
  }

  // Queues a pass and records its peak.
  QueuedPass Queue(const PassRows& rows, const std::function<QueuedPass(const PassRows&)>& pass) {
    if (!has_bound()) return pass(rows);
    const auto peaks = std::make_shared<PassPeaks>(type_, held_bytes_.size());
    QueuedPass queued;
    {
      const MemoryScope observed(peaks);
      queued = pass(rows);
    }
    constexpr double kLeastShare = 1e-6;
    Observed now = {static_cast<double>(rows.size()), static_cast<double>(rows.steps), kLeastShare};
    int64_t most_bytes = -1;
    const std::vector<PassPeaks::Device> devices = peaks->devices();
    for (size_t i = 0; i < devices.size(); ++i) {
      if (!devices[i].is_used) continue;
      // Memory that was freed since the method began was not the pass's.
      const int64_t held_bytes = std::min(held_bytes_[i], devices[i].least_bytes);
      const auto room = static_cast<double>(static_cast<int64_t>(budget_bytes_) - held_bytes);
      const int64_t own_bytes = devices[i].peak_bytes - held_bytes;
      // A next pass of this size has the same peak plus what this one holds for copies.
      const double own = static_cast<double>(own_bytes) + static_cast<double>(queued.held_bytes);
      now.share = std::max(now.share, room > 0 ? own / room : kGrowth);
      most_bytes = std::max(most_bytes, devices[i].peak_bytes);
    }
    TORCH_CHECK(
        most_bytes >= 0,
        "nothing was seen of what a pass takes of the device: a profiler hides it, or nothing "
        "runs there; leave device_budget_bytes at 0");
    if (most_bytes > static_cast<int64_t>(budget_bytes_)) {
      TORCH_CHECK_WITH(OutOfMemoryError, !observed_.empty(), "the smallest pass, ", rows.examples,
                       " example at ", rows.steps, " steps, takes up to ", most_bytes,
                       " bytes of a device, and the budget is ", budget_bytes_,
                       ": raise device_budget_bytes to that, or run the forward function in an "
                       "OffloadScope");
      PINION_LOG(kWarning) << "a pass of " << rows.size() << " rows took " << most_bytes
                           << " bytes of a device, and the budget is " << budget_bytes_
                           << ": passes are smaller from now on";
      most_rows_ = MostRows(now);
    }
    observed_.push_back(now);
    return queued;
  }

 private:
  bool has_bound() const { return budget_bytes_ > 0; }

  struct Observed {
    double rows = 0;
    double steps = 0;
    double share = 0;  // of the headroom, on the device where it is largest
  };

  // Returns the most rows for a next pass that has at least as many steps per example as
  // `observed`. With fewer steps the same rows would have more examples, and memory per example
  // (the path's ends) would grow faster than the rows.
  double MostRows(const Observed& observed) const {
    return std::min(
        {most_rows_, observed.rows * kRoomForRows / observed.share, observed.rows * kGrowth});
  }

  const uint64_t budget_bytes_;
  const c10::DeviceType type_;
  std::vector<int64_t> held_bytes_;  // by device, when the method began
  std::vector<Observed> observed_;
  double most_rows_ = std::numeric_limits<double>::infinity();  // set when a pass is too large
};

// ------------------------------------------------------------------------------------------ inputs

at::Tensor PointsBetween(const at::Tensor& baseline, const at::Tensor& difference,
                         absl::Span<const double> alphas) {
  std::vector<int64_t> sizes = difference.sizes().vec();
  const int64_t per_step = sizes.front();
  sizes.front() *= static_cast<int64_t>(alphas.size());
  at::Tensor points = at::empty(sizes, difference.options());
  for (size_t step = 0; step < alphas.size(); ++step) {
    points.narrow(0, static_cast<int64_t>(step) * per_step, per_step)
        .copy_(baseline + alphas[step] * difference);
  }
  return points;
}

void CheckInputs(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& additional) {
  TORCH_CHECK(!inputs.empty(), "there is no input to attribute to");
  for (const std::vector<at::Tensor>* tensors : {&inputs, &additional}) {
    for (const at::Tensor& tensor : *tensors) {
      TORCH_CHECK(tensor.defined(), "an input is an undefined tensor: give one that has examples");
      TORCH_CHECK(tensor.dim() > 0 && tensor.size(0) == inputs.front().size(0), "an input of ",
                  tensor.sizes(), " beside a first one of ", inputs.front().sizes(),
                  ": the first dimension of each counts the examples");
    }
  }
}

PathInputs::PathInputs(std::vector<at::Tensor> inputs, std::vector<at::Tensor> baselines,
                       std::vector<at::Tensor> additional)
    : inputs_(std::move(inputs)),
      baselines_(std::move(baselines)),
      additional_(std::move(additional)) {
  CheckInputs(inputs_, additional_);
  if (baselines_.empty()) {
    for (const at::Tensor& input : inputs_) {
      baselines_.push_back(at::zeros({}, input.options().requires_grad(false)));
    }
  }
  TORCH_CHECK(baselines_.size() == inputs_.size(), "there are ", baselines_.size(),
              " baselines for ", inputs_.size(), " inputs: give one each, or none");
  for (size_t i = 0; i < inputs_.size(); ++i) {
    at::Tensor& baseline = baselines_[i];
    std::vector<int64_t> one = inputs_[i].sizes().vec();
    one.front() = 1;
    TORCH_CHECK(baseline.dim() == 0 || baseline.sizes() == inputs_[i].sizes() ||
                    baseline.sizes() == at::IntArrayRef(one),
                "a baseline of ", baseline.sizes(), " for an input of ", inputs_[i].sizes(),
                ": it has the input's sizes, or 1 example, or no dimension");
    TORCH_CHECK(baseline.device() == inputs_[i].device(), "a baseline on ", baseline.device(),
                " for an input on ", inputs_[i].device(), ": put both on one device");
    baseline = baseline.detach().expand(inputs_[i].sizes());
  }
}

at::Tensor PathInputs::Difference(const PassRows& rows, size_t input) const {
  return ExamplesOf(inputs_[input], rows) - ExamplesOf(baselines_[input], rows);
}

void PathInputs::AppendAdditional(const PassRows& rows, std::vector<at::Tensor>& to) const {
  for (const at::Tensor& tensor : additional_) {
    to.push_back(RepeatExamples(tensor, rows));
  }
}

std::vector<at::Tensor> PathInputs::Between(const PassRows& rows,
                                            absl::Span<const double> alphas) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    TORCH_CHECK(inputs_[i].is_floating_point() || inputs_[i].is_complex(), "input ", i, " is of ",
                inputs_[i].scalar_type(),
                ", between whose values there is no path: attribute to a layer behind it, with "
                "LayerIntegratedGradients");
    all.push_back(PointsBetween(
        ExamplesOf(baselines_[i], rows), Difference(rows, i),
        alphas.subspan(static_cast<size_t>(rows.first_step), static_cast<size_t>(rows.steps))));
  }
  AppendAdditional(rows, all);
  return all;
}

std::vector<at::Tensor> PathInputs::Repeated(const std::vector<at::Tensor>& of,
                                             const PassRows& rows) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all;
  for (const at::Tensor& tensor : of) all.push_back(RepeatExamples(tensor, rows));
  AppendAdditional(rows, all);
  return all;
}

// -------------------------------------------------------------------------------------------- sums

at::Tensor StepOf(const at::Tensor& tensor, int64_t step, const PassRows& rows) {
  TORCH_CHECK(tensor.dim() > 0 && tensor.size(0) % rows.size() == 0, "a layer of ", tensor.sizes(),
              " in a pass of ", rows.size(),
              " rows: its first dimension counts the rows of each "
              "step, so tap a value of which it does");
  const int64_t per_step = tensor.size(0) / rows.steps;
  return tensor.narrow(0, step * per_step, per_step);
}

at::Tensor SumOverSteps(const at::Tensor& tensor, const PassRows& rows,
                        absl::Span<const double> weights) {
  const at::ScalarType dtype = at::promote_types(tensor.scalar_type(), at::kFloat);
  at::Tensor sum = StepOf(tensor, 0, rows).to(dtype) * weights.front();
  for (int64_t step = 1; step < rows.steps; ++step) {
    sum.add_(StepOf(tensor, step, rows), weights[static_cast<size_t>(step)]);
  }
  return sum;
}

at::Tensor SumTermsOverSteps(
    const std::vector<at::Tensor>& tensors, const PassRows& rows,
    const std::function<void(at::Tensor& sum, const std::vector<at::Tensor>& blocks)>& add) {
  const at::Tensor first_step = StepOf(tensors.front(), 0, rows);
  const at::ScalarType dtype = at::promote_types(first_step.scalar_type(), at::kFloat);
  const at::Tensor result = at::zeros(first_step.sizes(), first_step.options().dtype(dtype));
  uint64_t memory_bytes = result.nbytes();
  std::vector<at::Tensor> by_step;
  for (const at::Tensor& tensor : tensors) {
    by_step.push_back(tensor.contiguous().view({rows.steps, -1}));
    const bool is_copied = !tensor.is_contiguous();
    memory_bytes += (is_copied ? 3 : 1) * tensor.nbytes();
  }
  at::Tensor flat = result.view({-1});
  const int64_t most = flat.is_cpu() ? kBlockElements : std::max<int64_t>(flat.numel(), 1);
  for (int64_t begin = 0; begin < flat.numel(); begin += most) {
    const int64_t count = std::min(most, flat.numel() - begin);
    std::vector<at::Tensor> blocks;
    for (const at::Tensor& tensor : by_step) blocks.push_back(tensor.narrow(1, begin, count));
    at::Tensor sum = flat.narrow(0, begin, count);
    add(sum, blocks);
  }
  if (result.is_cpu()) CountHostArithmetic(memory_bytes);
  return result;
}

// -------------------------------------------------------------------------------------------- runs

PassRun::PassRun(AttributionSession& session, const AttributedForward& forward,
                 std::vector<std::string> layers, const Target& target, const PassGrid& grid,
                 uint64_t device_budget_bytes, const LayerOptions& options)
    : session_(session),
      forward_(forward),
      names_(std::move(layers)),
      target_(target),
      grid_(grid),
      budget_(std::make_unique<PassBudget>(device_budget_bytes, session.device_type())),
      options_(options),
      copies_(session.NewCopies()),
      layers_(names_.size()) {
  target_.CheckExamples(grid_.examples);
  TORCH_CHECK(device_budget_bytes == 0 || !options_.keep_on_device,
              "results that stay on the device would take from device_budget_bytes as they grow: "
              "leave LayerOptions::keep_on_device at false, or device_budget_bytes at 0");
}

PassRun::~PassRun() = default;

std::vector<LayerAttribution> PassRun::Sum(const std::function<QueuedPass(const PassRows&)>& pass) {
  std::function<void()> finish_last;
  PassRows rows;
  while (rows.first_example < grid_.examples) {
    rows.examples = budget_->Examples(grid_.examples - rows.first_example);
    for (rows.first_step = 0; rows.first_step + grid_.overlap < grid_.steps;
         rows.first_step += rows.steps - grid_.overlap) {
      rows.steps = budget_->Steps(rows.examples, grid_.steps - rows.first_step, grid_.overlap + 1);
      std::function<void()> finish = budget_->Queue(rows, pass).finish;
      finish_last.swap(finish);
      if (finish) finish();
    }
    rows.first_example += rows.examples;
  }
  if (finish_last) finish_last();
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    const auto first = std::find(names_.begin(), names_.end(), names_[layer]) - names_.begin();
    for (const auto& [tensor, groups] : groups_[static_cast<size_t>(first)]) {
      layers_[layer].tensors.push_back(session_.Concatenate(groups.sums));
    }
  }
  return std::move(layers_);
}

QueuedPass PassRun::Gradients(const PassRows& rows, const std::vector<at::Tensor>& inputs,
                              LayerCallbacks callbacks, bool with_values) {
  if (!callbacks.on_arrival) {
    callbacks.on_arrival = [this, rows](LayerPart part, LayerTensor& tensor) {
      Add(part, rows, std::move(tensor.gradient));
    };
  }
  LayerOptions options = options_;
  options.activations = with_values;
  const auto pending = std::make_shared<PendingLayers>(StartGradients(
      copies_, forward_, names_, inputs,
      target_.OfRows(rows.first_example, rows.examples, rows.steps), options, callbacks));
  const auto finish = [this, pending] {
    const std::vector<LayerResult> results = pending->Wait();
    for (size_t layer = 0; layer < results.size(); ++layer) {
      layers_[layer].ran = layers_[layer].ran || results[layer].ran;
      layers_[layer].connected = layers_[layer].connected || results[layer].connected();
    }
  };
  return {copies_->HeldBytes(), finish};
}

PendingLayers PassRun::Values(const std::vector<at::Tensor>& inputs, bool keep_on_device) {
  LayerOptions options = options_;
  options.activations = true;
  options.keep_on_device = options.keep_on_device || keep_on_device;
  return StartValues(copies_, forward_, names_, inputs, options);
}

void PassRun::Add(LayerPart part, const PassRows& rows, at::Tensor tensor) {
  Groups& groups = groups_[part.layer][part.tensor];
  if (groups.first_example != rows.first_example) {
    groups.first_example = rows.first_example;
    groups.sums.push_back(std::move(tensor));
    return;
  }
  at::Tensor& sum = groups.sums.back();
  TORCH_CHECK(sum.sizes() == tensor.sizes(), "layer \"", names_[part.layer], "\" has ",
              tensor.sizes(), " in one pass and ", sum.sizes(),
              " in another one: its first dimension alone may depend on the rows");
  sum.add_(tensor);
  if (tensor.is_cpu()) CountHostArithmetic(3 * tensor.nbytes());
}

}  // namespace pinion
