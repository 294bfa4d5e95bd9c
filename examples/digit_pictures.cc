#include "pinion/examples/digit_pictures.h"

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/upsample_bilinear2d.h>

#include <cstdint>
#include <iterator>
#include <vector>

namespace pinion {
namespace {

constexpr Digit kDigits[] = {
#include "pinion/examples/digits_table.inc"
};

constexpr size_t kHeldOutOf = 5;

// Maps [count, 1, 8, 8] to [count, 1, 64, 64].
at::Tensor Enlarged(const at::Tensor& pictures) {
  return at::upsample_bilinear2d(pictures, {kPictureSide, kPictureSide},
                                 /*align_corners=*/false);
}

LabelledPictures Pictures(bool held_out) {
  std::vector<float> ink;
  std::vector<int64_t> labels;
  for (size_t i = 0; i < std::size(kDigits); ++i) {
    if ((i % kHeldOutOf == 0) != held_out) continue;
    ink.insert(ink.end(), std::begin(kDigits[i].ink), std::end(kDigits[i].ink));
    labels.push_back(kDigits[i].label);
  }
  const at::Tensor small =
      at::tensor(ink).view({-1, 1, kDigitSide, kDigitSide}) / static_cast<double>(kDigitInk);
  return {Enlarged(small), at::tensor(labels)};
}

}  // namespace

absl::Span<const Digit> AllDigits() { return kDigits; }

LabelledPictures DigitsToLearn() { return Pictures(/*held_out=*/false); }
LabelledPictures DigitsHeldOut() { return Pictures(/*held_out=*/true); }

at::Tensor DigitFrom(const GrayImage& image) {
  std::vector<uint8_t> pixels = image.pixels;
  at::Tensor picture =
      at::from_blob(pixels.data(), {1, 1, image.height, image.width}, at::kByte).to(at::kFloat) /
      255;
  // Ink covers less than half of a digit's picture.
  if (picture.median().item<float>() > 0.5f) picture = 1 - picture;
  return Enlarged(at::adaptive_avg_pool2d(picture, {kDigitSide, kDigitSide}));
}

}  // namespace pinion
