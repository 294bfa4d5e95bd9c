// Digits as the network takes them: tensors on the host, of 64 x 64 pixels from 0, paper, to 1.
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

// Of every five digits of the data set the first is held out.
LabelledPictures DigitsToLearn();
LabelledPictures DigitsHeldOut();

// A picture of a digit of any size, which becomes a square: [1, 1, 64, 64]. It goes through the
// data set's 8 x 8 pixels. Dark ink on a bright ground is turned over.
at::Tensor DigitFrom(const GrayImage& image);

}  // namespace pinion

#endif  // PINION_EXAMPLES_DIGIT_PICTURES_H_
