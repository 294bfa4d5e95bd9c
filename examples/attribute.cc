// Teaches a small network to read digits and explains its answers. A PNG shows each picture beside
// Grad-CAM and integrated gradients.
//
//   attribute                        a held-out digit, under a limit of device memory at which the
//                                    same without Pinion, which is tried as well, fails
//   attribute --picture=7,me.png     others: held-out ones by their index, and PNG files
//   attribute --no_pinion            without Pinion alone: runs out of device memory

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/examples/checkpoint.h"
#include "pinion/examples/digit_net.h"
#include "pinion/examples/digit_pictures.h"
#include "pinion/examples/explanation.h"
#include "pinion/examples/heat_map.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/command_line.h"
#include "pinion/programs/output_file.h"

ABSL_FLAG(std::string, picture, "5",
          "what is explained, in as many rows: held-out digits by their index, and PNG files with "
          "one digit each, as 7,me.png");
ABSL_FLAG(std::string, out, "attribution.png", "PNG file to write the pictures to");
ABSL_FLAG(int64_t, n_steps, 50, "steps of integrated gradients");
ABSL_FLAG(
    std::string, memory_limit, "12MiB",
    "of device memory while it explains, as 12MiB, or unlimited; on CUDA Pinion's budget above "
    "what the device holds when it begins, which nothing else keeps to");
ABSL_FLAG(bool, no_pinion, false,
          "explain by hand instead: all steps in one batch, everything on the device");
ABSL_FLAG(int64_t, epochs, 3, "how often each picture is learned");
ABSL_FLAG(uint64_t, seed, 1, "of the initial weights and the pictures' order");
ABSL_FLAG(std::string, device, "", "cuda:N or emu:0; default: cuda:0 with a driver, else emu:0");
ABSL_FLAG(std::string, resume, "", "checkpoint to take the weights from instead of training");
ABSL_FLAG(std::string, checkpoint, "",
          "file to write the weights to once they are learned, and at the end the pictures and "
          "their maps besides; torch.load reads it");

namespace pinion {
namespace {

constexpr char kUnlimited[] = "unlimited";

struct Flags {
  ExplanationOptions explain;
  DigitTrainingOptions training;
};

absl::StatusOr<Flags> ReadFlags() {
  Flags flags;
  PINION_ASSIGN_OR_RETURN(flags.training.device, ChooseDevice(absl::GetFlag(FLAGS_device)));
  flags.training.seed = absl::GetFlag(FLAGS_seed);
  flags.training.epochs = absl::GetFlag(FLAGS_epochs);
  flags.explain.device = flags.training.device;
  flags.explain.with_pinion = !absl::GetFlag(FLAGS_no_pinion);
  flags.explain.steps = absl::GetFlag(FLAGS_n_steps);
  if (flags.explain.steps < 1 || flags.training.epochs < 1) {
    return absl::InvalidArgumentError(absl::StrCat("--n_steps=", flags.explain.steps,
                                                   " and --epochs=", flags.training.epochs,
                                                   " must be at least 1"));
  }
  if (const std::string limit = absl::GetFlag(FLAGS_memory_limit); limit != kUnlimited) {
    PINION_ASSIGN_OR_RETURN(flags.explain.memory_limit_bytes,
                            ParseBytes("--memory_limit", limit, kUnlimited));
  }
  const std::string out = absl::GetFlag(FLAGS_out);
  if (!absl::EndsWith(out, ".png")) {
    return absl::InvalidArgumentError(
        absl::StrCat("--out=", out, " does not end in .png, which is what is written"));
  }
  PINION_RETURN_IF_ERROR(CheckWritable(out));
  const std::string checkpoint = absl::GetFlag(FLAGS_checkpoint);
  if (!checkpoint.empty()) PINION_RETURN_IF_ERROR(CheckWritable(checkpoint));
  return flags;
}

absl::StatusOr<at::Tensor> ChoosePictures(const LabelledPictures& held_out) {
  std::vector<at::Tensor> pictures;
  const int64_t count = held_out.labels.numel();
  const std::vector<std::string> names = absl::StrSplit(absl::GetFlag(FLAGS_picture), ',');
  for (const std::string& name : names) {
    int64_t index = 0;
    if (!absl::SimpleAtoi(name, &index)) {
      PINION_ASSIGN_OR_RETURN(at::Tensor picture, ReadDigit(name));
      pictures.push_back(std::move(picture));
    } else if (index < 0 || index >= count) {
      return absl::InvalidArgumentError(absl::StrCat("--picture=", name, ": there are ", count,
                                                     " held-out digits, the first is 0"));
    } else {
      pictures.push_back(held_out.pictures.slice(0, index, index + 1));
    }
  }
  return at::cat(pictures);
}

absl::StatusOr<DigitNet> Learn(const DigitTrainingOptions& options,
                               const LabelledPictures& held_out) {
  const std::string resume = absl::GetFlag(FLAGS_resume);
  const auto begin = std::chrono::steady_clock::now();
  PINION_ASSIGN_OR_RETURN(DigitNet net, resume.empty() ? TrainDigitNet(DigitsToLearn(), options)
                                                       : ReadDigitNet(resume));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  absl::PrintF("network  %s in %.1f s; reads %.1f %% of %d held-out digits right\n",
               resume.empty() ? absl::StrCat("trained on ", options.device) : "from " + resume,
               seconds.count(), 100 * DigitAccuracy(net, held_out), held_out.labels.numel());
  std::fflush(stdout);
  // Written first: learning takes the time, and later steps may fail or be stopped.
  if (const std::string path = absl::GetFlag(FLAGS_checkpoint); resume.empty() && !path.empty()) {
    Checkpoint weights;
    weights.tensors = DigitWeights(net);
    PINION_RETURN_IF_ERROR(WriteCheckpoint(path, weights));
  }
  return net;
}

// Returns the class that the network assigns to each picture.
std::vector<int64_t> Read(DigitNet& net, const at::Tensor& pictures) {
  const at::NoGradGuard no_grad;
  const at::Tensor classes = net->forward(pictures).argmax(1);
  return {classes.const_data_ptr<int64_t>(), classes.const_data_ptr<int64_t>() + classes.numel()};
}

// Returns how far the scores of `classes` exceed those of blank paper: the sum of integrated
// gradients.
at::Tensor ScoresAbovePaper(DigitNet& net, const at::Tensor& pictures,
                            const std::vector<int64_t>& classes) {
  const at::NoGradGuard no_grad;
  const at::Tensor above = net->forward(pictures) - net->forward(at::zeros_like(pictures));
  return above.gather(1, at::tensor(classes).unsqueeze(1)).squeeze(1);
}

std::vector<float> Numbers(const at::Tensor& picture) {
  const at::Tensor numbers = picture.to(at::kFloat).contiguous();
  return {numbers.const_data_ptr<float>(), numbers.const_data_ptr<float>() + numbers.numel()};
}

absl::Status WriteFiles(const DigitNet& net, const at::Tensor& pictures,
                        const std::vector<int64_t>& classes, const Explanation& explanation) {
  std::vector<HeatRow> rows;
  for (int64_t i = 0; i < pictures.size(0); ++i) {
    rows.push_back(
        {Numbers(pictures[i]),
         {Numbers(explanation.grad_cam[i]), Numbers(explanation.integrated_gradients[i])}});
  }
  PINION_ASSIGN_OR_RETURN(const std::string png, HeatSheet(rows, kPictureSide));
  const std::string out = absl::GetFlag(FLAGS_out);
  PINION_RETURN_IF_ERROR(WriteAtomically(out, png));
  absl::PrintF("wrote    %s: the picture, Grad-CAM of %s, integrated gradients\n", out,
               kLastDigitBlock);

  const std::string path = absl::GetFlag(FLAGS_checkpoint);
  if (path.empty()) return absl::OkStatus();
  Checkpoint checkpoint;
  checkpoint.tensors = DigitWeights(net);
  checkpoint.tensors.emplace("pictures", pictures);
  checkpoint.tensors.emplace("classes", at::tensor(classes));
  checkpoint.tensors.emplace("grad_cam", explanation.grad_cam);
  checkpoint.tensors.emplace("integrated_gradients", explanation.integrated_gradients);
  return WriteCheckpoint(path, checkpoint);
}

absl::Status Attribute(const std::vector<char*>& arguments) {
  if (arguments.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", arguments[1], "\" is not a flag; see --help"));
  }
  PINION_ASSIGN_OR_RETURN(const Flags flags, ReadFlags());
  const ExplanationOptions& options = flags.explain;
  const LabelledPictures held_out = DigitsHeldOut();
  PINION_ASSIGN_OR_RETURN(const at::Tensor pictures, ChoosePictures(held_out));

  absl::PrintF("data     %d digits of UCI's optdigits, of which %d are held out\n",
               AllDigits().size(), held_out.labels.numel());
  PINION_ASSIGN_OR_RETURN(DigitNet net, Learn(flags.training, held_out));
  StopBySignal();  // until here there is nothing to write
  const std::vector<int64_t> classes = Read(net, pictures);

  const bool limited = options.memory_limit_bytes != UINT64_MAX;
  absl::PrintF("explain  on %s, %s, with %d steps of integrated gradients\n", options.device,
               limited ? "within " + HumanBytes(options.memory_limit_bytes) : "without a limit",
               options.steps);
  std::fflush(stdout);
  const absl::StatusOr<Explanation> explanation = Explain(options, net, pictures, classes);
  if (absl::IsCancelled(explanation.status())) {
    absl::PrintF("stopped  by a signal, without an explanation\n");
    return absl::OkStatus();
  }
  if (absl::IsResourceExhausted(explanation.status())) {
    return absl::ResourceExhaustedError(
        absl::StrCat(options.device, " ran out of memory ",
                     options.with_pinion ? "with Pinion; use fewer pictures"
                                         : "without Pinion; leave --no_pinion out",
                     " or use a higher --memory_limit\n", explanation.status().message()));
  }
  PINION_RETURN_IF_ERROR(explanation.status());
  if (StopSignal() != 0) {
    absl::PrintF("stopped  by a signal, without a comparison\n");
  } else if (options.with_pinion) {
    PINION_ASSIGN_OR_RETURN(const std::string comparison,
                            CompareWithByHand(options, net, pictures, classes, *explanation));
    absl::PrintF("%s", comparison);
  }
  const at::Tensor scores = ScoresAbovePaper(net, pictures, classes);
  for (int64_t i = 0; i < pictures.size(0); ++i) {
    absl::PrintF(
        "picture  read as %d, with a score %.3f above that of empty paper; integrated gradients "
        "add up to %.3f\n",
        classes[i], scores[i].item<double>(),
        explanation->integrated_gradients[i].sum().item<double>());
  }
  return WriteFiles(net, pictures, classes, *explanation);
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("shows which parts of a digit speak for what a network reads");
  const std::vector<char*> arguments = pinion::ParseFlags(argc, argv);
  absl::Status status = pinion::EnterWorkingDirectory();
  try {
    if (status.ok()) status = pinion::Attribute(arguments);
  } catch (const c10::Error& error) {
    status = absl::InternalError(error.what_without_backtrace());
  } catch (const std::exception& error) {
    status = absl::InternalError(error.what());
  }
  if (status.ok()) return pinion::StopSignal() == 0 ? 0 : 128 + pinion::StopSignal();
  std::fprintf(stderr, "attribute: %s\n", std::string(status.message()).c_str());
  return 1;
}
