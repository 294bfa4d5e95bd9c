// The pictures of handwritten digits that example programs learn: the test set of UCI's "Optical
// Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, CC BY 4.0), as scikit-learn's
// package ships it. The program carries them inside.
//
// Thread safety: immutable.

#ifndef PINION_EXAMPLES_DIGITS_H_
#define PINION_EXAMPLES_DIGITS_H_

#include <cstdint>

#include "absl/types/span.h"

namespace pinion {

inline constexpr int kDigitSide = 8;  // pixels
inline constexpr int kDigitInk = 16;  // of a pixel, at most

// As the package's lines have it.
struct Digit {
  uint8_t ink[kDigitSide * kDigitSide];  // row by row; 0: paper
  uint8_t label;                         // 0 to 9
};

// All 1,797 of them.
absl::Span<const Digit> AllDigits();

}  // namespace pinion

#endif  // PINION_EXAMPLES_DIGITS_H_
