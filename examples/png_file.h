// Pictures as PNG files, by libpng.
//
// Thread safety: thread-safe.

#ifndef PINION_EXAMPLES_PNG_FILE_H_
#define PINION_EXAMPLES_PNG_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace pinion {

struct RgbImage {
  int width = 0;
  int height = 0;
  std::vector<uint8_t> pixels;  // three bytes each, row by row
};

struct GrayImage {
  int width = 0;
  int height = 0;
  std::vector<uint8_t> pixels;  // row by row; 0: black
};

// The file's contents.
absl::StatusOr<std::string> EncodePng(const RgbImage& image);

// The brightness of a picture of any kind, on black where it is transparent. The error names `path`
// and why.
absl::StatusOr<GrayImage> ReadGrayPng(const std::string& path);

}  // namespace pinion

#endif  // PINION_EXAMPLES_PNG_FILE_H_
