// The parameters of a Program, and its forward.

#ifndef PINION_TESTS_HOOKS_PROGRAMS_PROGRAM_NET_H_
#define PINION_TESTS_HOOKS_PROGRAMS_PROGRAM_NET_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <array>
#include <cstddef>
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

  // Returns the loss; stores the last registers in `results` unless it is null.
  at::Tensor Loss(const at::Tensor& input, bool odd_step, Registers* results);

 private:
  at::Tensor Parameter(size_t index);
  at::Tensor Apply(const Op& op, const at::Tensor& a, const at::Tensor& b);
  at::Tensor Recurrent(const at::Tensor& a);
  void RunOps(size_t begin, size_t end, bool odd_step, Registers& registers);
  void RunSegment(OpKind kind, size_t begin, size_t end, bool odd_step, Registers& registers);

  const Program program_;
  const bool checkpoints_;
  torch::nn::ParameterList parameters_;
  at::Tensor running_mean_, running_variance_;
  int guards_ = 0;            // of segments that have run
  at::Tensor guards_at_end_;  // those whose operator was called; undefined without guards
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_PROGRAMS_PROGRAM_NET_H_
