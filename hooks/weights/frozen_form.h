// How weights that are not trained rest on the host: narrower than the device uses them.
//
//   WeightOptions options;
//   options.frozen_form = pinion::FrozenForm::kInt8Blocks;   // of float32 a quarter travels
//
// A weight is widened by its first use on the device, and what is computed is what a model of the
// widened weights computes, bit for bit: IEEE arithmetic, one product in float32, which is rounded
// once more where the weight's type is narrower.
//
// Pure functions. Tensors and storages are the caller's.

#ifndef PINION_HOOKS_WEIGHTS_FROZEN_FORM_H_
#define PINION_HOOKS_WEIGHTS_FROZEN_FORM_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstdint>

#include "absl/status/status.h"

namespace pinion {

enum class FrozenForm {
  kAsIs,
  kBFloat16,  // rounded to nearest even; of wider types
  // In blocks of 128 values in the order of memory: s = max |w| / 127 in float32, q = round(w / s)
  // in eight bits; the weight is q * s. Of floating types. (Dettmers et al., "8-bit Optimizers via
  // Block-wise Quantization", 2022, with linear levels.)
  kInt8Blocks,
};

inline constexpr int64_t kInt8BlockValues = 128;

// What a storage of weights is at rest.
struct RestingForm {
  FrozenForm form = FrozenForm::kAsIs;
  c10::ScalarType type = c10::ScalarType::Byte;  // on the device; bytes if kAsIs
  int64_t values = 0;

  uint64_t resting_bytes() const;
  uint64_t wide_bytes() const;
};

// Of the tensor's storage, which rests as it is if its type is no wider than `form`, or if it has
// bytes that the tensor does not show.
RestingForm RestingFormOf(const at::Tensor& tensor, FrozenForm form);

struct StoragePlace {
  c10::Storage storage;
  uint64_t offset_bytes = 0;  // a multiple of 8
};

// On the host. InvalidArgument: values that are not finite, which have no int8 form; nothing was
// written then.
absl::Status Narrow(const StoragePlace& wide, const RestingForm& form, const StoragePlace& resting);
// On the device of both, and its current stream.
void Widen(const StoragePlace& resting, const RestingForm& form, const StoragePlace& wide);

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_FROZEN_FORM_H_
