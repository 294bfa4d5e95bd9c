// The parameters of a Program, and its forward.

#ifndef PINION_TESTS_HOOKS_PROGRAMS_PROGRAM_NET_H_
#define PINION_TESTS_HOOKS_PROGRAMS_PROGRAM_NET_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "pinion/tests/hooks/programs/program.h"

namespace pinion::testing {

using Registers = std::array<at::Tensor, kRegisters>;

class ProgramNet {
 public:
  // Builds on the CPU. Without `checkpoints`, segments run as plain operators.
  ProgramNet(const Program& program, bool checkpoints);

  // The parameters.
  torch::nn::ParameterList& module() { return parameters_; }
  // Moves everything but the parameters to the device; module() moves those.
  void MoveBuffers(at::Device device);

  // Whether each run of a segment has called the operator of its guard (guarded_segments).
  bool GuardsHaveRun() const;

  // Returns the loss of a step, counted from 0; stores the last registers in `results` unless it is
  // null.
  at::Tensor Loss(const at::Tensor& input, int step, Registers* results);

  // Is called after each operator, also in recomputations.
  void set_after_operator(std::function<void()> call) { after_operator_ = std::move(call); }

  // Adds a metric of `a` to metrics(), by temporary memory (Program::odd_steps_measure). Saves
  // nothing.
  void Measure(const at::Tensor& a);
  int64_t metrics() const { return metrics_; }

 private:
  at::Tensor Parameter(size_t index);
  at::Tensor Apply(const Op& op, const at::Tensor& a, const at::Tensor& b);
  at::Tensor Recurrent(const at::Tensor& a);
  // `measure_at`: measures before the first operator from this one on that no segment has, or at
  // the end.
  void RunOps(size_t begin, size_t end, bool odd_step, Registers& registers,
              size_t measure_at = kNever);
  void RunSegment(OpKind kind, size_t begin, size_t end, bool odd_step, Registers& registers);

  static constexpr size_t kNever = SIZE_MAX;

  const Program program_;
  const bool checkpoints_;
  torch::nn::ParameterList parameters_;
  at::Tensor running_mean_, running_variance_;
  int64_t metrics_ = 0;
  int guards_ = 0;  // of segments that have run
  std::function<void()> after_operator_ = [] {};
  at::Tensor guards_at_end_;  // those whose operator was called; undefined without guards
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_PROGRAMS_PROGRAM_NET_H_
