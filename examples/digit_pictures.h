// Digits as the network's input: host tensors of 64 x 64 pixels from 0 (paper) to 1.
//
// Thread safety: thread-safe.

#ifndef PINION_EXAMPLES_DIGIT_PICTURES_H_
#define PINION_EXAMPLES_DIGIT_PICTURES_H_

#include <ATen/core/Tensor.h>

#include "pinion/examples/png_file.h"

namespace pinion {

struct LabelledPictures {
  at::Tensor pictures;  // [count, 1, 64, 64]
  at::Tensor labels;    // [count], integers from 0 to 9
};

// The data set without each fifth digit, which is held out.
LabelledPictures DigitsToLearn();
LabelledPictures DigitsHeldOut();

// Converts a picture of any size to a square, [1, 1, 64, 64], by way of the data set's 8 x 8
// pixels. Inverts dark ink on a bright ground.
at::Tensor DigitFrom(const GrayImage& image);

}  // namespace pinion

#endif  // PINION_EXAMPLES_DIGIT_PICTURES_H_
