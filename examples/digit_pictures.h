// Handwritten digits compiled into the program: the test set of UCI's "Optical Recognition of
// Handwritten Digits" (E. Alpaydin and C. Kaynak, CC BY 4.0) from scikit-learn's package. The
// network's inputs are host tensors of 64 x 64 pixels from 0 (paper) to 1.
//
// Thread safety: thread-safe.

#ifndef PINION_EXAMPLES_DIGIT_PICTURES_H_
#define PINION_EXAMPLES_DIGIT_PICTURES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace pinion {

inline constexpr int kDigitSide = 8;         // pixels of the data set's pictures
inline constexpr int kDigitInk = 16;         // of a pixel, at most
inline constexpr int64_t kPictureSide = 64;  // pixels of the network's inputs

// One line of the package's file.
struct Digit {
  uint8_t ink[kDigitSide * kDigitSide];  // row by row; 0: paper
  uint8_t label;                         // 0 to 9
};

// Returns all 1,797 digits.
absl::Span<const Digit> AllDigits();

struct LabelledPictures {
  at::Tensor pictures;  // [count, 1, 64, 64]
  at::Tensor labels;    // [count], integers from 0 to 9
};

// The data set without each fifth digit, which is held out.
LabelledPictures DigitsToLearn();
LabelledPictures DigitsHeldOut();

// Converts a PNG of any size to a square, [1, 1, 64, 64], by way of the data set's 8 x 8 pixels.
// Inverts dark ink on a bright ground; transparent pixels are black. The error names `path` and the
// cause.
absl::StatusOr<at::Tensor> ReadDigit(const std::string& path);

}  // namespace pinion

#endif  // PINION_EXAMPLES_DIGIT_PICTURES_H_
