// PNG files, by libpng.
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

// Returns the file's contents.
absl::StatusOr<std::string> EncodePng(const RgbImage& image);

// Reads the brightness of any PNG; transparent pixels are black. The error names `path` and the
// cause.
absl::StatusOr<GrayImage> ReadGrayPng(const std::string& path);

}  // namespace pinion

#endif  // PINION_EXAMPLES_PNG_FILE_H_
