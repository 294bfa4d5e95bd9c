// Runs the program as a user does, and checks its results against a second implementation of the
// network, which computes in double on the CPU.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/diag.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linalg_eigh.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <png.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/examples/checkpoint.h"
#include "pinion/examples/digit_pictures.h"
#include "pinion/tests/support/run_program.h"

namespace pinion {
namespace {

using at::Tensor;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using testing::FileContents;
using ::testing::HasSubstr;
using testing::ProgramOutcome;
using testing::RunProgram;
using ::testing::StartsWith;

constexpr int64_t kPictures = 10;
constexpr size_t kHeldOutOf = 5;  // the first digit of each such group is held out
constexpr int64_t kSteps = 50;
constexpr int kPanel = 256, kPitch = 264;  // pixels of the sheet

// Returns the number after the first `text` in `out`, or -1.
double NumberAfter(const std::string& out, const std::string& text) {
  const size_t at = out.find(text);
  return at == std::string::npos ? -1 : std::strtod(out.c_str() + at + text.size(), nullptr);
}

// Relative to the norm of `b`. The largest difference would not be stable: a relu input close to
// zero may round to either side, which changes a few pixels.
double Difference(const Tensor& a, const Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

// Returns the first held-out digit of each class, as an argument of --picture.
std::string OneOfEachClass() {
  std::string indices;
  for (int label = 0; label < kPictures; ++label) {
    size_t digit = 0;
    while (AllDigits()[digit].label != label) digit += kHeldOutOf;
    absl::StrAppend(&indices, label == 0 ? "" : ",", digit / kHeldOutOf);
  }
  return indices;
}

// The network, loaded from its checkpoint.
class Oracle {
 public:
  explicit Oracle(const std::map<std::string, Tensor>& tensors) {
    for (const auto& [name, tensor] : tensors) {
      tensors_.emplace(name, tensor.is_floating_point() ? tensor.to(at::kDouble) : tensor);
    }
  }

  const Tensor& operator[](const std::string& name) const { return tensors_.at(name); }

  Tensor LastBlock(Tensor x) const {
    for (int block = 0; block < 4; ++block) {
      const auto weight = [&](const char* name) {
        return (*this)[absl::StrCat("model.blocks.", block, ".", name)];
      };
      if (block > 0) x = at::avg_pool2d(x, 2);
      x = at::conv2d(x, weight("0.weight"), {}, 1, 1);
      x = at::batch_norm(x, weight("1.weight"), weight("1.bias"), weight("1.running_mean"),
                         weight("1.running_var"), /*training=*/false, 0, 1e-5, false);
      x = at::relu(x);
    }
    return x;
  }
  Tensor Scores(const Tensor& last_block) const {
    return at::linear(last_block.mean({2, 3}), (*this)["model.head.weight"],
                      (*this)["model.head.bias"]);
  }
  // Returns each picture's score for its own class.
  Tensor Selected(const Tensor& scores) const {
    return scores.gather(1, (*this)["classes"].unsqueeze(1)).squeeze(1);
  }
  Tensor ScoresOf(const Tensor& pictures) const { return Selected(Scores(LastBlock(pictures))); }

  Tensor GradCam() const {
    const Tensor block = LastBlock((*this)["pictures"]).requires_grad_();
    const Tensor gradient = torch::autograd::grad({Selected(Scores(block)).sum()}, {block})[0];
    const Tensor map = (gradient.mean({2, 3}, true) * block).sum(1, true).relu();
    return at::upsample_bilinear2d(map.detach(), {64, 64}, /*align_corners=*/false);
  }

  // Golub and Welsch: the steps are the eigenvalues of the polynomials' recurrence matrix.
  Tensor IntegratedGradients() const {
    const Tensor i = at::arange(1, kSteps, at::kDouble);
    const Tensor beside = i / (4 * i * i - 1).sqrt();
    const auto [places, vectors] = at::linalg_eigh(at::diag(beside, 1) + at::diag(beside, -1));
    const Tensor weights = vectors[0].square();
    const Tensor pictures = (*this)["pictures"];
    Tensor sum = at::zeros_like(pictures);
    for (int64_t step = 0; step < kSteps; ++step) {
      const Tensor x = (pictures * ((1 + places[step]) / 2)).detach().requires_grad_();
      sum += weights[step] * torch::autograd::grad({ScoresOf(x).sum()}, {x})[0];
    }
    return sum * pictures;
  }

 private:
  std::map<std::string, Tensor> tensors_;
};

// Trains once for all tests, because training dominates the time.
class AttributeTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    std::filesystem::remove_all(Path(""));
    std::filesystem::create_directories(Path(""));
    outcome_ = Run(absl::StrCat("--picture=", OneOfEachClass(), " --out=", Path("sheet.png"),
                                " --checkpoint=", Path("trained")));
  }

  void SetUp() override { ASSERT_EQ(outcome_.exit_code, 0) << outcome_.err; }

  static std::string Path(const std::string& name) {
    return ::testing::TempDir() + "/attribute_test/" + name;
  }
  static ProgramOutcome Run(const std::string& flags) {
    return RunProgram("examples/attribute --device=emu:0 " + flags);
  }
  // Resumes from the first run's checkpoint.
  static ProgramOutcome Again(const std::string& flags) {
    return Run(absl::StrCat("--resume=", Path("trained"), " --out=", Path("again.png"),
                            " --checkpoint=", Path("again"), " ", flags));
  }
  static Oracle Read(const std::string& name) {
    return Oracle(ReadCheckpoint(Path(name)).value().tensors);
  }

  static inline ProgramOutcome outcome_;
};

TEST_F(AttributeTest, TheNetworkReadsNineOfTenHeldOutDigits) {
  EXPECT_THAT(outcome_.out, HasSubstr("1797 digits"));
  EXPECT_THAT(outcome_.out, HasSubstr("of 360 held-out digits right"));
  EXPECT_GT(NumberAfter(outcome_.out, "reads "), 90);
  EXPECT_EQ(outcome_.err, "");
}

TEST_F(AttributeTest, TheDataSetHasAsManyOfEachDigitAsUciSays) {
  std::vector<int> counts(10);
  for (const Digit& digit : AllDigits()) {
    ++counts.at(digit.label);
    EXPECT_LE(*std::max_element(std::begin(digit.ink), std::end(digit.ink)), kDigitInk);
  }
  EXPECT_EQ(counts, std::vector<int>({178, 182, 177, 183, 181, 182, 181, 179, 174, 180}));
}

TEST_F(AttributeTest, AtTheDefaultLimitPinionFitsAndTheSameByHandDoesNot) {
  EXPECT_THAT(outcome_.out, HasSubstr("within 12 MiB"));
  EXPECT_THAT(outcome_.out, ContainsRegex("with Pinion     peak .*   fits"));
  EXPECT_THAT(outcome_.out, ContainsRegex("without Pinion  peak .*   out of memory: asked for "
                                          "[0-9.]+ MiB, in use [0-9.]+ MiB of 12 MiB"));
  EXPECT_GT(NumberAfter(outcome_.out, "without Pinion  peak"), 12);

  const ProgramOutcome one = Again("");
  EXPECT_EQ(one.exit_code, 0) << one.err;
  EXPECT_THAT(one.out, ContainsRegex("without Pinion  peak .*   out of memory"));

  const ProgramOutcome none = Again(absl::StrCat("--no_pinion --out=", Path("none.png")));
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_THAT(none.err, StartsWith("attribute: emu:0 ran out of memory without Pinion; leave "));
  EXPECT_FALSE(std::filesystem::exists(Path("none.png")));
}

TEST_F(AttributeTest, WithoutALimitBothWaysPassAndTheirMapsAreTheSame) {
  const ProgramOutcome by_hand =
      Again("--no_pinion --memory_limit=unlimited --picture=" + OneOfEachClass());
  ASSERT_EQ(by_hand.exit_code, 0) << by_hand.err;
  const Oracle pinion = Read("trained"), hand = Read("again");
  for (const char* map : {"grad_cam", "integrated_gradients"}) {
    EXPECT_LE(Difference(pinion[map], hand[map]), 1e-3) << map;
  }
  EXPECT_THAT(Again("--memory_limit=unlimited").out, ContainsRegex("without.*no limit"));
}

TEST_F(AttributeTest, TheMapsAreThoseOfTheNetworkInDouble) {
  const Oracle oracle = Read("trained");
  EXPECT_LE(Difference(oracle["grad_cam"], oracle.GradCam()), 1e-4);
  EXPECT_LE(Difference(oracle["integrated_gradients"], oracle.IntegratedGradients()), 1e-3);
}

TEST_F(AttributeTest, IntegratedGradientsAddUpToTheScore) {
  const Oracle oracle = Read("trained");
  const Tensor score =
      oracle.ScoresOf(oracle["pictures"]) - oracle.ScoresOf(at::zeros_like(oracle["pictures"]));
  const Tensor sums = oracle["integrated_gradients"].sum({1, 2, 3});
  EXPECT_LE(Difference(sums, score), 0.05);
  const double said = NumberAfter(outcome_.out, "integrated gradients add up to ");
  EXPECT_NEAR(said, sums[0].item<double>(), 1e-3);
}

// Removing the pixels with the highest attribution must hurt the score most.
TEST_F(AttributeTest, WithoutTheBestFifthOfTheInkTheScoreIsLowerThanWithoutAnother) {
  const Oracle oracle = Read("trained");
  const Tensor pictures = oracle["pictures"];
  const auto without = [&](const Tensor& order) {  // removes the first pixels of `order`
    const Tensor flat = order.masked_fill(pictures == 0, -1e9).flatten(1);
    const Tensor rank = flat.argsort(1, /*descending=*/true).argsort(1, /*descending=*/false);
    const Tensor fifth = (pictures > 0).flatten(1).sum(1, true) / 5;
    return oracle.ScoresOf(pictures.masked_fill((rank < fifth).view_as(pictures), 0));
  };
  torch::manual_seed(1);
  Tensor random = at::zeros_like(oracle["classes"].to(at::kDouble));
  constexpr int kDraws = 5;
  for (int draw = 0; draw < kDraws; ++draw) random += without(at::rand_like(pictures)) / kDraws;
  const Tensor best = without(oracle["integrated_gradients"]);
  EXPECT_GT((random - best).mean().item<double>(), 0);
}

TEST_F(AttributeTest, TheSheetHasThePicturesAndItsHeatIsOnTheInk) {
  png_image png = {};
  png.version = PNG_IMAGE_VERSION;
  ASSERT_NE(png_image_begin_read_from_file(&png, Path("sheet.png").c_str()), 0) << png.message;
  ASSERT_EQ(png.width, 3 * kPitch - (kPitch - kPanel));
  ASSERT_EQ(png.height, kPictures * kPitch - (kPitch - kPanel));
  png.format = PNG_FORMAT_RGB;
  std::vector<uint8_t> pixels(PNG_IMAGE_SIZE(png));
  ASSERT_NE(png_image_finish_read(&png, nullptr, pixels.data(), 0, nullptr), 0) << png.message;
  const Tensor sheet =
      at::from_blob(pixels.data(), {png.height, png.width, 3}, at::kByte).to(at::kDouble);

  const Oracle oracle = Read("trained");
  Tensor on_ink = at::zeros({2}, at::kDouble), on_paper = on_ink.clone();
  for (int64_t i = 0; i < kPictures; ++i) {
    const auto panel = [&](int column) {
      return sheet.slice(0, i * kPitch, i * kPitch + kPanel)
          .slice(1, column * kPitch, column * kPitch + kPanel);
    };
    const Tensor picture = oracle["pictures"][i][0].repeat_interleave(4, 0).repeat_interleave(4, 1);
    EXPECT_LE((panel(0) - 255 * picture.unsqueeze(2)).abs().max().item<double>(), 0.51);
    for (int map = 0; map < 2; ++map) {
      // The colour map's green rises from 1 to 231 with the heat.
      const Tensor heat = panel(1 + map).select(2, 1);
      EXPECT_EQ(heat.max().item<double>(), 231) << "picture " << i << ", map " << map;
      on_ink[map] += heat.masked_select(picture > 0.25).mean() / kPictures;
      on_paper[map] += heat.masked_select(picture <= 0.25).mean() / kPictures;
    }
  }
  EXPECT_GT(on_ink[0].item<double>(), on_paper[0].item<double>()) << "Grad-CAM";
  EXPECT_GT(on_ink[1].item<double>(), 2 * on_paper[1].item<double>()) << "integrated gradients";
}

TEST_F(AttributeTest, APngOfADigitIsReadAsThatDigit) {
  // Draws the first digit, a held-out 0, as ink on 80 x 80 pixels of white paper.
  std::vector<uint8_t> pixels;
  for (int i = 0; i < 80 * 80; ++i) {
    const int ink = AllDigits()[0].ink[i / 800 * 8 + i % 80 / 10];
    pixels.insert(pixels.end(), 3, static_cast<uint8_t>(255 - 255 * ink / kDigitInk));
  }
  png_image png = {};
  png.version = PNG_IMAGE_VERSION;
  png.width = png.height = 80;
  png.format = PNG_FORMAT_RGB;
  ASSERT_NE(png_image_write_to_file(&png, Path("digit.png").c_str(), 0, pixels.data(), 0, nullptr),
            0)
      << png.message;
  ASSERT_EQ(Again("--n_steps=1 --picture=" + Path("digit.png")).exit_code, 0);
  const Oracle file = Read("again"), held_out = Read("trained");
  EXPECT_EQ(file["classes"][0].item<int64_t>(), held_out["classes"][0].item<int64_t>());
  EXPECT_LE((file["pictures"][0] - held_out["pictures"][0]).abs().max().item<double>(), 0.01);
}

TEST_F(AttributeTest, ASignalWhileItExplainsLeavesTheWeightsThatItHasLearned) {
  const std::string log = Path("log"), weights = Path("weights");
  ProgramOutcome outcome;
  outcome.exit_code = 0;
  // On a busy machine the signal may come when all is explained. Then there is more to explain.
  for (int n_steps = 1000; outcome.exit_code == 0 && n_steps <= 16'000; n_steps *= 2) {
    std::filesystem::remove(log);
    std::filesystem::remove(Path("stopped.png"));
    outcome = RunProgram(
        absl::StrCat("{ examples/attribute --device=emu:0 --epochs=1 --n_steps=", n_steps,
                     " --picture=", OneOfEachClass(), " --out=", Path("stopped.png"),
                     " --checkpoint=", weights, " > ", log, " & id=$!; until grep -q '^explain' ",
                     log, " || ! kill -0 $id; do sleep 0.1; done; kill -INT $id; wait $id; }"));
  }
  EXPECT_EQ(outcome.exit_code, 130) << outcome.err;
  EXPECT_THAT(FileContents(log), HasSubstr("stopped  by a signal"));
  EXPECT_FALSE(std::filesystem::exists(Path("stopped.png")));
  const ProgramOutcome resumed =
      Run(absl::StrCat("--n_steps=1 --no_pinion --resume=", weights, " --out=", Path("later.png")));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
}

TEST_F(AttributeTest, BadInputGetsOneLineThatSaysWhatIsWrong) {
  ASSERT_TRUE(WriteCheckpoint(Path("strange"), {}).ok());
  const std::string cases[][2] = {
      {"--picture=360", "there are 360 held-out digits"},
      {"--picture=-1", "--picture=-1"},
      {"--picture=/no/such.png", "/no/such.png"},
      {"--picture=" + Path("strange"), "Not a PNG"},
      {"--n_steps=0", "--n_steps=0"},
      {"--memory_limit=lots", "--memory_limit=lots"},
      {"--out=/no/such/directory/out.png", "/no/such/directory/out.png"},
      {"--out=picture.jpg", "--out=picture.jpg does not end in .png"},
      {"--resume=" + Path("strange"), "has no tensor model."},
      {"stray", "stray"},
  };
  for (const auto& [flags, part] : cases) {
    SCOPED_TRACE(flags);
    const ProgramOutcome outcome =
        Run(absl::StrCat("--out=", Path("bad.png"), " --checkpoint=", Path("bad"), " ", flags));
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_THAT(outcome.err, AllOf(StartsWith("attribute: "), HasSubstr(part)));
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_FALSE(std::filesystem::exists(Path("bad.png")));
    EXPECT_FALSE(std::filesystem::exists(Path("bad")));
  }
}

}  // namespace
}  // namespace pinion
