#include "pinion/examples/heat_map.h"

#include <png.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

using Rgb = std::array<double, 3>;

struct RgbImage {
  int width = 0;
  int height = 0;
  std::vector<uint8_t> pixels;  // three bytes each, row by row
};

// Every ninth colour of matplotlib's viridis (CC0).
constexpr Rgb kViridis[] = {{68, 1, 84},    {72, 40, 120},  {62, 74, 137},  {49, 104, 142},
                            {38, 130, 142}, {31, 158, 137}, {53, 183, 121}, {110, 206, 88},
                            {181, 222, 43}, {253, 231, 37}};

constexpr double kBrightest = 0.99;  // share of a map's numbers below the brightest colour

// `share` from 0 to 1.
Rgb Gray(double share) { return {255 * share, 255 * share, 255 * share}; }

Rgb Viridis(double share) {
  const double place = share * (std::size(kViridis) - 1);
  const size_t below = std::min<size_t>(place, std::size(kViridis) - 2);
  Rgb colour;
  for (size_t i = 0; i < colour.size(); ++i) {
    colour[i] = std::lerp(kViridis[below][i], kViridis[below + 1][i], place - below);
  }
  return colour;
}

// Returns the number with the brightest colour.
float BrightestOf(std::vector<float> map) {
  const auto place = map.begin() + static_cast<ptrdiff_t>(kBrightest * (map.size() - 1));
  std::nth_element(map.begin(), place, map.end());
  // If few numbers are positive, the highest one.
  return *place > 0 ? *place : *std::max_element(place, map.end());
}

void DrawPanel(RgbImage& sheet, int left, int top, const std::vector<float>& numbers, int side,
               float brightest, const std::function<Rgb(double share)>& colour) {
  const int zoom = kHeatPanelSide / side;
  for (int y = 0; y < kHeatPanelSide; ++y) {
    for (int x = 0; x < kHeatPanelSide; ++x) {
      const float number = numbers[y / zoom * side + x / zoom];
      const Rgb rgb = colour(number > 0 ? std::min(number / brightest, 1.0f) : 0);
      uint8_t* const pixel =
          sheet.pixels.data() + (size_t{3} * (top + y) * sheet.width + 3 * (left + x));
      for (int i = 0; i < 3; ++i) pixel[i] = static_cast<uint8_t>(std::lround(rgb[i]));
    }
  }
}

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

}  // namespace

absl::StatusOr<std::string> HeatSheet(const std::vector<HeatRow>& rows, int side) {
  PINION_CHECK(kHeatPanelSide % side == 0) << side << " pixels do not fill a panel evenly";
  const auto length = [](size_t panels) {
    return static_cast<int>(panels) * (kHeatPanelSide + kHeatPanelGap) - kHeatPanelGap;
  };
  RgbImage sheet = {length(1 + rows.front().maps.size()), length(rows.size()), {}};
  sheet.pixels.assign(size_t{3} * sheet.width * sheet.height, 255);
  int top = 0;
  for (const HeatRow& row : rows) {
    DrawPanel(sheet, 0, top, row.picture, side, 1, Gray);
    int left = 0;
    for (const std::vector<float>& map : row.maps) {
      left += kHeatPanelSide + kHeatPanelGap;
      DrawPanel(sheet, left, top, map, side, BrightestOf(map), Viridis);
    }
    top += kHeatPanelSide + kHeatPanelGap;
  }
  return EncodePng(sheet);
}

}  // namespace pinion
