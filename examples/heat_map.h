// Draws pictures beside the explanations of their class, in a perceptual colour map.
//
// Thread safety: thread-safe.

#ifndef PINION_EXAMPLES_HEAT_MAP_H_
#define PINION_EXAMPLES_HEAT_MAP_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace pinion {

inline constexpr int kHeatPanelSide = 256;  // pixels
inline constexpr int kHeatPanelGap = 8;     // between panels

// Squares of `side` x `side` numbers, row by row.
struct HeatRow {
  std::vector<float> picture;  // from 0, black, to 1, white
  // Positive numbers get colours: dark for zero, the brightest for the highest hundredth. Negative
  // numbers get zero's colour.
  std::vector<std::vector<float>> maps;
};

// Returns the contents of a PNG file with a row of panels for each of `rows`, which have equally
// many maps. `side` divides kHeatPanelSide.
absl::StatusOr<std::string> HeatSheet(const std::vector<HeatRow>& rows, int side);

}  // namespace pinion

#endif  // PINION_EXAMPLES_HEAT_MAP_H_
