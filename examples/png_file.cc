#include "pinion/examples/png_file.h"

#include <png.h>

#include <cstdint>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace pinion {
namespace {

// More pixels than a camera's picture, within any machine's memory.
constexpr int64_t kMostPixels = int64_t{1} << 28;

}  // namespace

absl::StatusOr<std::string> EncodePng(const RgbImage& image) {
  png_image png = {};
  png.version = PNG_IMAGE_VERSION;
  png.width = image.width;
  png.height = image.height;
  png.format = PNG_FORMAT_RGB;
  png_alloc_size_t size_bytes = PNG_IMAGE_PNG_SIZE_MAX(png);
  std::string contents(size_bytes, '\0');
  if (png_image_write_to_memory(&png, contents.data(), &size_bytes, /*convert_to_8_bit=*/0,
                                image.pixels.data(), /*row_stride=*/0,
                                /*colormap=*/nullptr) == 0) {
    return absl::InternalError(absl::StrCat("libpng cannot write the picture: ", png.message));
  }
  contents.resize(size_bytes);
  return contents;
}

absl::StatusOr<GrayImage> ReadGrayPng(const std::string& path) {
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
  GrayImage image = {static_cast<int>(png.width), static_cast<int>(png.height), {}};
  image.pixels.resize(PNG_IMAGE_SIZE(png));
  if (png_image_finish_read(&png, &black, image.pixels.data(), /*row_stride=*/0,
                            /*colormap=*/nullptr) == 0) {
    return error(png.message);
  }
  return image;
}

}  // namespace pinion
