#include "pinion/examples/digit_pictures.h"

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <png.h>

#include <cstdint>
#include <iterator>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace pinion {
namespace {

constexpr Digit kDigits[] = {
#include "pinion/examples/digits_table.inc"
};

constexpr size_t kHeldOutOf = 5;

// More pixels than a camera's picture, within any machine's memory.
constexpr int64_t kMostPixels = int64_t{1} << 28;

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

absl::StatusOr<at::Tensor> ReadDigit(const std::string& path) {
  png_image png = {};
  png.version = PNG_IMAGE_VERSION;
  const absl::Cleanup free_png = [&png] { png_image_free(&png); };
  const auto error = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("cannot read ", path, " as a PNG: ", why));
  };
  if (png_image_begin_read_from_file(&png, path.c_str()) == 0) return error(png.message);
  if (int64_t{png.width} * png.height > kMostPixels) {
    return error(absl::StrCat(png.width, " x ", png.height, " pixels are more than ", kMostPixels));
  }
  png.format = PNG_FORMAT_GRAY;
  const png_color black = {};
  at::Tensor picture = at::empty({1, 1, png.height, png.width}, at::kByte);
  if (png_image_finish_read(&png, &black, picture.mutable_data_ptr(), /*row_stride=*/0,
                            /*colormap=*/nullptr) == 0) {
    return error(png.message);
  }
  picture = picture.to(at::kFloat) / 255;
  // Ink covers less than half of a digit's picture.
  if (picture.median().item<float>() > 0.5f) picture = 1 - picture;
  return Enlarged(at::adaptive_avg_pool2d(picture, {kDigitSide, kDigitSide}));
}

}  // namespace pinion
