#include "pinion/tests/hooks/programs/run_program.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/SequenceNumber.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adam.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/device/allocation_bytes.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/programs/program_net.h"
#include "pinion/tests/hooks/support/autocast_region.h"
#include "pinion/tests/hooks/support/cpu_kernels.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

using at::Tensor;

constexpr uint64_t kMemoryBytes = 256 * kMiB;
constexpr uint64_t kLeastTarget = 1;  // everything that can be offloaded is

// How a program runs.
struct Mode {
  bool offload = false;
  // Where the program's target is a number.
  std::optional<uint64_t> target_bytes = std::nullopt;
  std::optional<uint64_t> limit_bytes = std::nullopt;  // of the device
};

struct Result {
  std::string name;  // "step 2: gradient 3"
  Tensor value;      // on the CPU
};

struct Run {
  std::vector<Result> results;
  uint64_t peak_bytes = 0;
  uint64_t steps_over_target = 0;
  Verdict failure;  // but for bits
};

OffloadOptions OptionsOf(const Program& program, const Mode& mode) {
  OffloadOptions options = SmallWindows(OffloadOptions::kAutoWindow);
  options.min_offload_bytes = static_cast<uint64_t>(program.min_bytes);
  options.offload_leaves = program.offload_leaves != 0;
  options.verify = program.verify != 0;
  options.cast_weights_again = program.copies_casts == 0;
  // A target takes the place of windows, of which one in tensors takes the place of one in bytes.
  if (mode.target_bytes.has_value()) {
    options.memory_target_bytes = *mode.target_bytes;
  } else if (program.target == 1) {
    options.memory_target_bytes = OffloadOptions::kAutoTarget;
  } else if (program.blocking != 0) {
    options.overlap = false;
  } else if (program.window_tensors != 0) {
    options.eviction_window_tensors = static_cast<uint64_t>(program.window_tensors);
  } else if (program.window_kib != 0) {
    options.eviction_window_bytes = static_cast<uint64_t>(program.window_kib) * kKiB;
    options.prefetch_window_bytes = options.eviction_window_bytes;
  }
  return options;
}

std::unique_ptr<torch::optim::Optimizer> NewOptimizer(int kind,
                                                      const std::vector<Tensor>& trained) {
  constexpr double kRate = 0.01;
  if (kind == 2) return std::make_unique<torch::optim::Adam>(trained, kRate);
  return std::make_unique<torch::optim::SGD>(
      trained, torch::optim::SGDOptions(kRate).momentum(kind == 1 ? 0.9 : 0));
}

WeightOptions WeightOptionsOf(const Program& program, const Mode& mode) {
  WeightOptions options = {.tier = SmallTier()};
  if (mode.target_bytes == kLeastTarget) {
    options.window_bytes = static_cast<uint64_t>(program.width * program.width) * sizeof(float);
  } else if (mode.target_bytes.has_value()) {
    options.memory_target_bytes = *mode.target_bytes;
  }
  return options;
}

class Training {
 public:
  Training(const Program& program, const Mode& mode, std::shared_ptr<EmulatedMachine> machine)
      : program_(program), machine_(std::move(machine)) {
    SeedFor(-1, 0, 0);
    net_ = std::make_unique<ProgramNet>(program, /*checkpoints=*/mode.offload);
    net_->MoveBuffers(device_);
    const DeviceBackend backend = EmulatedBackend(machine_);
    if (mode.offload && program.session != 0) {
      session_ = OffloadSession::Create(OptionsOf(program, mode), backend).value();
    }
    if (mode.offload && program.streams_weights != 0) {
      weights_ =
          WeightOffloader::Attach(*net_->module(), device_, backend, WeightOptionsOf(program, mode))
              .value();
      trained_ = weights_->host_parameters();
    } else {
      net_->module()->to(device_);
      trained_ = net_->module()->parameters();
    }
    optimizer_ = NewOptimizer(program.optimizer, trained_);
  }

  const std::shared_ptr<OffloadSession>& session() const { return session_; }
  // "step 1, backward": what it is at.
  std::string place() const { return absl::StrCat("step ", step_, ", ", phase_); }

  std::vector<Result> Train() {
    for (step_ = 0; step_ < program_.steps; ++step_) {
      for (int micro = 0; micro < program_.micro_batches; ++micro) MicroBatch(micro);
      Update();
    }
    for (size_t i = 0; i < trained_.size(); ++i) Keep("parameter", i, trained_[i]);
    return std::move(results_);
  }

 private:
  // At most 64 steps of 8 micro-batches of 8 forwards.
  void SeedFor(int step, int micro_batch, int forward) const {
    const int place = ((step + 1) * 8 + micro_batch) * 8 + forward;
    at::manual_seed(static_cast<uint64_t>(program_.seed) * 4096 + static_cast<uint64_t>(place));
  }

  void Keep(const char* what, size_t index, const Tensor& value) {
    results_.push_back({absl::StrCat("step ", step_, ": ", what, " ", index),
                        value.defined() ? value.detach().cpu().clone() : Tensor()});
  }

  // Autograd adds up gradients in the order of their nodes' numbers, which each thread counts by
  // itself. Those of forward stay ahead of those that a backward makes on its worker, so that equal
  // programs add in equal order.
  static void StayAheadOfWorkers() {
    constexpr int kMoreThanABackwardMakes = 20000;
    for (int i = 0; i < kMoreThanABackwardMakes; ++i) at::sequence_number::get_and_increment();
  }

  void MicroBatch(int micro) {
    StayAheadOfWorkers();
    struct Forward {
      Tensor input, loss;
      Registers results;
    };
    const bool odd_step = step_ % 2 == 1;
    const int64_t rows =
        odd_step && program_.odd_steps_are_short ? program_.rows / 2 : program_.rows;
    std::vector<Forward> forwards(static_cast<size_t>(program_.forwards));
    for (size_t i = 0; i < forwards.size(); ++i) {
      phase_ = "forward";
      SeedFor(step_, micro, static_cast<int>(i));
      Forward& forward = forwards[i];
      forward.input = at::randn({rows, program_.width}).to(device_);
      if (program_.input_requires_grad != 0) forward.input.requires_grad_(true);
      {
        std::optional<OffloadScope> scope;
        if (session_ != nullptr && program_.scope_has_module) {
          scope.emplace(session_, *net_->module());
        } else if (session_ != nullptr) {
          scope.emplace(session_);
        }
        std::optional<AutocastRegion> autocast;
        if (program_.autocast != 0) autocast.emplace(device_.type());
        forward.loss = net_->Loss(forward.input, odd_step,
                                  program_.holds_results ? &forward.results : nullptr);
      }
      if (program_.loss_behind) forward.loss = forward.loss + NothingOfMuch(rows);
    }
    if (program_.newest_first) std::reverse(forwards.begin(), forwards.end());
    phase_ = "backward";
    for (Forward& forward : forwards) {
      Backward(forward.loss);
      Keep("loss", 0, forward.loss);
      if (forward.input.grad().defined()) Keep("gradient of the input", 0, forward.input.grad());
      forward = {};
    }
  }

  // Zero, by way of temporary memory, of which nothing is saved.
  Tensor NothingOfMuch(int64_t rows) const {
    const at::NoGradGuard no_grad;
    return (at::ones({rows, 4 * program_.width}, device_).exp() * 0).sum();
  }

  void Backward(Tensor loss) const {
    if (program_.create_graph == 1 || (program_.create_graph == 2 && step_ % 2 == 1)) {
      Tensor penalty = at::zeros({}, loss.options());
      for (const Tensor& gradient :
           torch::autograd::grad({loss}, net_->module()->parameters(), {}, /*retain_graph=*/true,
                                 /*create_graph=*/true, /*allow_unused=*/true)) {
        if (gradient.defined()) penalty = penalty + gradient.square().mean();
      }
      loss = loss + penalty;
    }
    for (int left = program_.backwards - 1; left >= 0; --left) {
      loss.backward({}, /*retain_graph=*/left > 0);
    }
  }

  void Update() {
    phase_ = "update";
    if (weights_ != nullptr) weights_->WaitForGradients();
    for (size_t i = 0; i < trained_.size(); ++i) Keep("gradient", i, trained_[i].grad());
    if (weights_ != nullptr) {
      weights_->Step([this] { optimizer_->step(); });
      weights_->ZeroGrad();
    } else {
      optimizer_->step();
      // As WeightOffloader::ZeroGrad does: a gradient of -0 that is added to zeros becomes +0.
      const bool to_none = program_.streams_weights != 0 || program_.zero_gradients_stay == 0;
      optimizer_->zero_grad(to_none);
    }
  }

  const Program& program_;
  const std::shared_ptr<EmulatedMachine> machine_;
  const at::Device device_{"emu:0"};
  std::unique_ptr<ProgramNet> net_;
  std::shared_ptr<OffloadSession> session_;
  std::unique_ptr<WeightOffloader> weights_;
  std::vector<Tensor> trained_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<Result> results_;
  int step_ = 0;
  const char* phase_ = "forward";
};

// The first line. What the device's memory is held by is in the next ones.
std::string MessageOf(const std::exception& error) {
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text =
      torch_error == nullptr ? error.what() : torch_error->what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

std::shared_ptr<EmulatedMachine> NewMachine(const Program& program) {
  EmulatedOptions options;
  options.memory_bytes = kMemoryBytes;
  options.schedule = static_cast<EffectSchedule>(program.schedule);
  options.reuse = static_cast<ReuseMode>(program.reuse);
  options.seed = static_cast<uint64_t>(program.seed);
  options.abort_on_race = false;
  auto machine = EmulatedMachine::Create(options).value();
  absl::Status registered;
  PINION_CHECK(Soon([&] {
    registered = RegisterEmuDevice(machine);
    return registered.ok();
  })) << registered;
  return machine;
}

// Empty once nothing of a program is on the device, in host memory or in the session: autograd's
// workers may free their last references a moment after backward has returned.
std::string WhatIsLeft(EmulatedMachine& machine, const OffloadSession* session) {
  const auto look = [&]() -> std::string {
    if (session != nullptr && session->GetStats().live_handles > 0) {
      return absl::StrCat(session->GetStats().live_handles, " handles");
    }
    PINION_CHECK(machine.SynchronizeDevice(0).ok());
    if (session != nullptr && session->GetAllocatorStats().booked_bytes.current > 0) {
      return absl::StrCat(session->GetAllocatorStats().booked_bytes.current, " host bytes");
    }
    if (machine.memory_stats(0).in_use_bytes == 0) return "";
    return absl::StrCat(machine.memory_stats(0).in_use_bytes, " device bytes:\n",
                        machine.MemoryReport(0));
  };
  std::string left;
  Soon([&] { return (left = look()).empty(); });
  return left;
}

Run RunIn(const Program& program, const Mode& mode) {
  Run run;
  const auto machine = NewMachine(program);
  std::shared_ptr<OffloadSession> session;
  std::unique_ptr<Training> training;
  const auto failed = [&](FailureKind kind, const std::exception& error) {
    const std::string place = training == nullptr ? "before the first step" : training->place();
    run.failure = {kind, absl::StrCat(MessageOf(error), " (", place, ")")};
  };
  try {
    training = std::make_unique<Training>(program, mode, machine);
    session = training->session();
    PINION_CHECK(machine->SynchronizeDevice(0).ok());
    machine->ResetPeakMemory(0);
    if (mode.limit_bytes.has_value()) {
      PINION_CHECK(machine->SetMemoryLimit(0, *mode.limit_bytes).ok());
    }
    run.results = training->Train();
  } catch (const c10::OutOfMemoryError& error) {
    failed(FailureKind::kOutOfMemory, error);
  } catch (const std::exception& error) {
    failed(FailureKind::kError, error);
  }
  training.reset();
  if (session != nullptr) run.steps_over_target = session->GetStats().steps_over_target;
  run.peak_bytes = machine->memory_stats(0).peak_bytes;
  const std::string left = WhatIsLeft(*machine, session.get());
  if (!left.empty()) machine->BreakDevice(0, "a program has left something on it");
  if (!machine->races().empty()) {
    run.failure = {FailureKind::kRace, machine->races().front()};
  } else if (run.failure.kind == FailureKind::kNone && !left.empty()) {
    run.failure = {FailureKind::kLeft, left};
  }
  return run;
}

Verdict Compare(const Run& plain, const Run& offloaded) {
  if (offloaded.failure.kind != FailureKind::kNone) return offloaded.failure;
  if (plain.results.size() != offloaded.results.size()) {
    return {FailureKind::kBits, "another number of results"};
  }
  for (size_t i = 0; i < plain.results.size(); ++i) {
    const Result& expected = plain.results[i];
    const Tensor& actual = offloaded.results[i].value;
    if (expected.value.defined() != actual.defined() ||
        (actual.defined() && !SameBytes(expected.value, actual))) {
      return {FailureKind::kBits, absl::StrCat(expected.name, " differs")};
    }
  }
  return {};
}

}  // namespace

std::string Verdict::ToString() const {
  constexpr const char* kNames[] = {"passes",      "wrong bits",        "out of memory", "an error",
                                    "a data race", "something is left", "not a program"};
  return absl::StrCat(kNames[static_cast<int>(kind)], what.empty() ? "" : ": ", what);
}

Verdict RunProgram(const Program& program) {
  at::set_num_threads(1);
  ChooseCpuKernels();
  const Run plain = RunIn(program, {});
  if (plain.failure.kind != FailureKind::kNone) {
    return {FailureKind::kInvalid, plain.failure.ToString()};
  }
  Mode mode = {.offload = true};
  if (program.target != 2) return Compare(plain, RunIn(program, mode));
  mode.target_bytes = kLeastTarget;
  // The log says that the least target cannot be met.
  const LogSink log = SetLogSink([](LogSeverity, const std::string&) {});
  const Run least = RunIn(program, mode);
  SetLogSink(log);
  if (const Verdict verdict = Compare(plain, least); verdict.kind != FailureKind::kNone) {
    return {verdict.kind, absl::StrCat("with the least memory: ", verdict.what)};
  }
  const uint64_t most_bytes = std::max(least.peak_bytes, plain.peak_bytes);
  const uint64_t part_bytes =
      (most_bytes - least.peak_bytes) * static_cast<uint64_t>(program.target_percent) / 100;
  mode.target_bytes =
      least.peak_bytes + part_bytes / kAllocationGranularityBytes * kAllocationGranularityBytes;
  mode.limit_bytes = mode.target_bytes;
  Verdict verdict = Compare(plain, RunIn(program, mode));
  if (verdict.kind != FailureKind::kOutOfMemory) return verdict;
  verdict.what = absl::StrCat("target ", *mode.target_bytes, " of ", least.peak_bytes, " to ",
                              plain.peak_bytes, ": ", verdict.what);
  if (program.odd_steps_skip == 0) return verdict;
  // docs/limits.md: what a step does that no record shows may take more, and is counted.
  mode.limit_bytes = *mode.target_bytes + *mode.target_bytes / 5;
  const Run with_room = RunIn(program, mode);
  if (with_room.steps_over_target == 0) return verdict;
  const Verdict verdict_with_room = Compare(plain, with_room);
  if (verdict_with_room.kind != FailureKind::kNone) return verdict_with_room;
  verdict.kind = FailureKind::kNone;
  return verdict;
}

}  // namespace pinion::testing
