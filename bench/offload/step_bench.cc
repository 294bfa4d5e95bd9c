// Compares methods of offloading by a training step's time on the machine's accelerator: measured
// on a GPU, modelled on the emulated device.
//
//   step_bench                              a GPT of two layers of width 2048, float32
//   step_bench --layers=8 --dtype=bfloat16  another one
//   step_bench --device=emu:0 --size=tiny   modelled
//   step_bench --json=FILE
//
// Methods take turns on one model, so that changes of the machine's speed affect all.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/bench_main.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/offload/offload_method.h"
#include "pinion/bench/offload/offload_model.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/gpt_config.h"
#include "pinion/programs/run_options.h"

ABSL_FLAG(std::string, device, "", "cuda:N or emu:0; default: cuda:0 with a driver, else emu:0");
ABSL_FLAG(std::string, preset, "h100_pcie5", "emulated device: one of the presets");
ABSL_FLAG(std::string, size, "", "shape of the model: tiny, small, medium, large or wide");
ABSL_FLAG(int64_t, layers, 2, "layers, unless there is a --size");
ABSL_FLAG(int64_t, width, 2048, "width of a layer, the same");
ABSL_FLAG(int64_t, heads, 16, "attention heads, the same");
ABSL_FLAG(int64_t, sequence, 1024, "tokens in a sequence, the same");
ABSL_FLAG(int64_t, batch, 4, "sequences in a step, the same");
ABSL_FLAG(std::string, dtype, "float32", "float32 or bfloat16");
ABSL_FLAG(int, rounds, 5, "how often each method has its turn");

namespace pinion {
namespace {

using Kind = OffloadMethod::Kind;

constexpr int64_t kVocabulary = 64;
// Warm-up: sessions record steps, measure the link, pin memory, and check once whether the plan is
// right (PlanValidator::kEvery).
constexpr int kWarmupSteps = 40;
constexpr int kStepsOfATurn = 3;

// LibTorch's CUDA allocator may add up to 1 MiB to blocks above 1 MiB and counts it. No record can
// predict which tensors get such blocks.
constexpr double kMostOverTarget = 1.01;

absl::StatusOr<GptConfig> ModelFromFlags() {
  GptConfig model;
  model.layers = absl::GetFlag(FLAGS_layers);
  model.width = absl::GetFlag(FLAGS_width);
  model.heads = absl::GetFlag(FLAGS_heads);
  model.sequence = absl::GetFlag(FLAGS_sequence);
  model.batch = absl::GetFlag(FLAGS_batch);
  if (const std::string size = absl::GetFlag(FLAGS_size); !size.empty()) {
    PINION_ASSIGN_OR_RETURN(model, FindGptSize(size));
  }
  model.vocabulary = kVocabulary;
  const std::string dtype = absl::GetFlag(FLAGS_dtype);
  if (dtype != "float32" && dtype != "bfloat16") {
    return absl::InvalidArgumentError(
        absl::StrCat("--dtype=", dtype, " is neither float32 nor bfloat16"));
  }
  model.bfloat16 = dtype == "bfloat16";
  PINION_RETURN_IF_ERROR(model.Validate());
  return model;
}

struct Contestant {
  OffloadMethod method;
  std::string name;
  MethodScopes scopes = {};
  std::vector<double> turn_ms = {};  // mean step of each turn
  uint64_t peak_bytes = 0;           // over all turns
  bool same_bits = true;             // gradients equal those of none

  double step_ms() const { return Summarize(turn_ms).median; }
};

class StepBench {
 public:
  StepBench(const GptConfig& config, Accelerator& accelerator)
      : accelerator_(accelerator), step_(PutGptOn(config, accelerator.device())) {}

  absl::Status Run(int rounds) {
    for (const Kind kind : {Kind::kNone, Kind::kBlocking, Kind::kTrl, Kind::kWindows}) {
      PINION_RETURN_IF_ERROR(Enter({kind}, OffloadMethod{kind}.name()));
    }
    for (const Kind like : {Kind::kTrl, Kind::kWindows}) {
      const Contestant& other = Of(like);
      PINION_RETURN_IF_ERROR(Enter({Kind::kPlanned, other.peak_bytes},
                                   absl::StrCat("planned within the peak of ", other.name)));
    }
    for (Contestant& contestant : contestants_) contestant.peak_bytes = 0;
    for (int round = 0; round < rounds; ++round) {
      for (Contestant& contestant : contestants_) TakeTurn(contestant);
    }
    for (Contestant& contestant : contestants_) {
      RunStep(contestant.scopes);
      CompareBits(contestant);
    }
    return absl::OkStatus();
  }

  void Judge(BenchReport& report) const {
    for (const Contestant& contestant : contestants_) {
      report.AddRow({{"method", contestant.name},
                     {"peak_bytes", contestant.peak_bytes},
                     {"step_ms", contestant.step_ms()},
                     {"of_none", contestant.step_ms() / Of(Kind::kNone).step_ms()},
                     {"same_bits", contestant.same_bits},
                     {"modelled", accelerator_.machine() != nullptr}});
    }
    report.PrintRows();
    report.AddNoneGoal("methods of Pinion's with other gradients than none", contestants_,
                       [](const Contestant& contestant) {
                         return !contestant.same_bits && !contestant.method.gives_other_strides();
                       });
    const Contestant& within_trl = contestants_[contestants_.size() - 2];
    report.AddGoal("windows: time over TRL's", AtMost(1),
                   Of(Kind::kWindows).step_ms() / Of(Kind::kTrl).step_ms());
    report.AddGoal("planned within TRL's peak: time over TRL's", AtMost(1),
                   within_trl.step_ms() / Of(Kind::kTrl).step_ms());
    const double most_over = accelerator_.machine() != nullptr ? 1 : kMostOverTarget;
    report.AddGoal("planned: peak over its target", AtMost(most_over), contestants_,
                   [](const Contestant& contestant) -> std::optional<double> {
                     if (!contestant.method.has_target()) return std::nullopt;
                     return static_cast<double>(contestant.peak_bytes) /
                            static_cast<double>(contestant.method.bytes);
                   });
  }

 private:
  const Contestant& Of(Kind kind) const {
    return *std::find_if(contestants_.begin(), contestants_.end(),
                         [kind](const Contestant& one) { return one.method.kind == kind; });
  }

  // Adds a contestant after its warm-up.
  absl::Status Enter(const OffloadMethod& method, std::string name) {
    Contestant contestant = {.method = method, .name = std::move(name)};
    PINION_ASSIGN_OR_RETURN(
        contestant.scopes,
        ScopesOf(method, {accelerator_.device(), accelerator_.backend()}, step_.Parameters()));
    for (int i = 0; i < kWarmupSteps; ++i) RunStep(contestant.scopes);
    if (expected_.empty()) expected_ = step_.Gradients();
    CompareBits(contestant);
    TakeTurn(contestant);
    contestant.turn_ms.clear();
    std::printf("ran      %s\n", contestant.name.c_str());
    std::fflush(stdout);
    contestants_.push_back(std::move(contestant));
    return absl::OkStatus();
  }

  void RunStep(const MethodScopes& scopes) {
    const std::shared_ptr<void> of_step = scopes.step();
    step_.Run(scopes.forward);
  }

  // Compares the gradients of the last step.
  void CompareBits(Contestant& contestant) {
    contestant.same_bits &= SameBits(step_.Gradients(), expected_);
  }

  void TakeTurn(Contestant& contestant) {
    RunStep(contestant.scopes);  // frees what other methods left
    accelerator_.Synchronize();
    accelerator_.ResetPeak();
    const double begin_ms = accelerator_.now_ms();
    for (int i = 0; i < kStepsOfATurn; ++i) RunStep(contestant.scopes);
    accelerator_.Synchronize();
    contestant.turn_ms.push_back((accelerator_.now_ms() - begin_ms) / kStepsOfATurn);
    contestant.peak_bytes = std::max(contestant.peak_bytes, accelerator_.peak_bytes());
  }

  Accelerator& accelerator_;
  ModelStep step_;
  std::vector<Contestant> contestants_;
  std::vector<at::Tensor> expected_;  // gradients without offload
};

absl::Status Run(BenchReport& report) {
  const int rounds = absl::GetFlag(FLAGS_rounds);
  if (rounds < 1) {
    return absl::InvalidArgumentError(absl::StrCat("--rounds=", rounds, " must be at least 1"));
  }
  RunOptions options;
  PINION_ASSIGN_OR_RETURN(options.model, ModelFromFlags());
  PINION_ASSIGN_OR_RETURN(options.preset, FindPreset(absl::GetFlag(FLAGS_preset)));
  PINION_ASSIGN_OR_RETURN(options.device, ChooseDevice(absl::GetFlag(FLAGS_device)));
  PINION_ASSIGN_OR_RETURN(Accelerator accelerator, Accelerator::Open(options));
  const GptConfig& model = options.model;
  absl::PrintF("device   %s, times are %s\n", options.device,
               accelerator.machine() == nullptr ? "measured" : "modelled");
  absl::PrintF("model    GPT, %d layers of width %d, %d sequences of %d, %s; saves about %s\n",
               model.layers, model.width, model.batch, model.sequence,
               model.bfloat16 ? "bfloat16" : "float32", HumanBytes(SavedBytes(model)));
  std::fflush(stdout);
  if (accelerator.device().is_cuda()) AskForRepeatableBits();
  StepBench bench(model, accelerator);
  PINION_RETURN_IF_ERROR(bench.Run(rounds));
  bench.Judge(report);
  return absl::OkStatus();
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  return pinion::BenchMain(argc, argv, "step_bench", "the cost of offloading on a device",
                           pinion::Run);
}
