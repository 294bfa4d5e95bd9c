// Handwritten digits compiled into the program: the test set of UCI's "Optical Recognition of
// Handwritten Digits" (E. Alpaydin and C. Kaynak, CC BY 4.0) from scikit-learn's package.
//
// Thread safety: immutable.

#ifndef PINION_EXAMPLES_DIGITS_H_
#define PINION_EXAMPLES_DIGITS_H_

#include <cstdint>

#include "absl/types/span.h"

namespace pinion {

inline constexpr int kDigitSide = 8;  // pixels
inline constexpr int kDigitInk = 16;  // of a pixel, at most

// One line of the package's file.
struct Digit {
  uint8_t ink[kDigitSide * kDigitSide];  // row by row; 0: paper
  uint8_t label;                         // 0 to 9
};

// Returns all 1,797 digits.
absl::Span<const Digit> AllDigits();

}  // namespace pinion

#endif  // PINION_EXAMPLES_DIGITS_H_
