// Trains a Program's net, with or without offload, and returns its results.

#ifndef PINION_TESTS_HOOKS_PROGRAMS_TRAINING_H_
#define PINION_TESTS_HOOKS_PROGRAMS_TRAINING_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/module_heads.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/programs/program.h"
#include "pinion/tests/hooks/programs/program_net.h"
#include "pinion/tests/hooks/programs/program_options.h"
#include "pinion/tests/support/fake_host.h"

namespace pinion::testing {

struct Result {
  std::string name;  // "step 2: gradient 3"
  at::Tensor value;  // on the CPU
};

class Training {
 public:
  Training(const Program& program, const Mode& mode, std::shared_ptr<EmulatedMachine> machine);

  // None without offload.
  const std::vector<std::shared_ptr<OffloadSession>>& sessions() const { return sessions_; }
  // The steps that exceeded the target among those that may, as the first odd one of a kind.
  uint64_t excused_steps_over_target() const { return excused_steps_over_; }
  // "step 1, backward": what it is at.
  std::string place() const;
  // Whether the forward that runs has saved nothing in a session's scope: no target holds yet.
  bool IsBeforeFirstSave() const;

  // Rethrows the program's exceptions. Throws std::logic_error if the library accepts an error.
  std::vector<Result> Train();

 private:
  void SeedFor(int step, int micro_batch, int forward) const;
  void Keep(const char* what, size_t index, const at::Tensor& value);
  void CreateSessions(const OffloadOptions& options, const Mode& mode);
  void CreateOtherModel(const OffloadOptions& options, const Mode& mode);
  void SetHostRoom() const;
  void Step();
  void WithoutLimit(absl::FunctionRef<void()> run);
  void LiftLimit();
  void RestoreLimit();
  void LimitFromFirstSave();
  uint64_t StepsOverTarget() const;
  uint64_t Packed() const;
  void BeginStep();
  void Score(const at::Tensor& input);
  void MicroBatch(int micro);
  at::Tensor ForwardInScope(const at::Tensor& input, Registers* results);
  std::unique_ptr<OffloadScope> NewScope();
  at::Tensor NothingOfMuch(int64_t rows) const;
  void SwapWeights() const;
  void Backward(at::Tensor loss) const;
  void RunEngine(const at::Tensor& loss, bool keeps_graph, bool makes_graph) const;
  void Update();
  void AddParameterTooLate();

  const Program& program_;
  const std::optional<uint64_t> limit_bytes_;  // of the device
  const bool limits_from_first_save_;
  const std::shared_ptr<EmulatedMachine> machine_;
  const at::Device device_{"emu:0"};
  std::unique_ptr<ProgramNet> net_;
  std::unique_ptr<FakeHost> host_;  // null: the real one
  std::vector<std::shared_ptr<OffloadSession>> sessions_;
  size_t scopes_ = 0;
  ModuleHeads heads_;
  std::unique_ptr<WeightOffloader> weights_;
  std::vector<at::Tensor> trained_;
  torch::nn::ParameterList other_model_;
  std::unique_ptr<WeightOffloader> other_weights_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<Result> results_;
  uint64_t excused_steps_over_ = 0;
  bool is_limit_lifted_ = false;
  bool awaits_first_save_ = false;  // of a micro-batch, before which there is no limit
  bool runs_forward_ = false;
  uint64_t packed_before_ = 0;  // Packed() when the micro-batch began
  int step_ = 0;
  const char* phase_ = "forward";
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_PROGRAMS_TRAINING_H_
