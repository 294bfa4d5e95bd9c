#include "pinion/hooks/weights/frozen_form.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/where.h>

#include <cmath>

namespace pinion {
namespace {

constexpr double kMostInt8 = 127;

int64_t BlocksOf(int64_t values) { return (values + kInt8BlockValues - 1) / kInt8BlockValues; }

at::Tensor View(const StoragePlace& place, uint64_t behind_bytes, c10::ScalarType type,
                int64_t rows, int64_t width) {
  const uint64_t item = (place.offset_bytes + behind_bytes) / c10::elementSize(type);
  at::Tensor tensor = at::empty({0}, at::TensorOptions(place.storage.device()).dtype(type));
  tensor.set_(place.storage, static_cast<int64_t>(item), {rows, width}, {width, 1});
  return tensor;
}

// `work` gets scales, levels and weights, in rows that share a scale: all full blocks at once, and
// the last one, which may be shorter.
template <typename Work>
void ForBlocks(const StoragePlace& resting, const RestingForm& form, const StoragePlace& wide,
               const Work& work) {
  const int64_t full = form.values / kInt8BlockValues;
  const int64_t rest = form.values % kInt8BlockValues;
  const auto rows = [&](int64_t first, int64_t count, int64_t width) {
    const auto value = static_cast<uint64_t>(first * kInt8BlockValues);
    const uint64_t scales_bytes = static_cast<uint64_t>(BlocksOf(form.values)) * sizeof(float);
    work(View(resting, static_cast<uint64_t>(first) * sizeof(float), at::kFloat, count, 1),
         View(resting, scales_bytes + value, at::kChar, count, width),
         View(wide, value * c10::elementSize(form.type), form.type, count, width));
  };
  if (full > 0) rows(0, full, kInt8BlockValues);
  if (rest > 0) rows(full, 1, rest);
}

}  // namespace

uint64_t RestingForm::resting_bytes() const {
  const auto count = static_cast<uint64_t>(values);
  switch (form) {
    case FrozenForm::kBFloat16:
      return count * c10::elementSize(at::kBFloat16);
    case FrozenForm::kInt8Blocks:
      return count + static_cast<uint64_t>(BlocksOf(values)) * sizeof(float);
    case FrozenForm::kAsIs:
      break;
  }
  return count;
}

uint64_t RestingForm::wide_bytes() const {
  return static_cast<uint64_t>(values) * c10::elementSize(type);
}

RestingForm RestingFormOf(const at::Tensor& tensor, FrozenForm form) {
  const c10::ScalarType type = tensor.scalar_type();
  const auto size_bytes = static_cast<int64_t>(tensor.storage().nbytes());
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(type));
  const int64_t least_bytes = form == FrozenForm::kBFloat16 ? 4 : 2;
  const bool is_narrowed = form != FrozenForm::kAsIs && c10::isFloatingType(type) &&
                           item_bytes >= least_bytes && tensor.numel() * item_bytes == size_bytes;
  if (!is_narrowed) return {.values = size_bytes};
  return {.form = form, .type = type, .values = size_bytes / item_bytes};
}

absl::Status Narrow(const StoragePlace& wide, const RestingForm& form,
                    const StoragePlace& resting) {
  if (form.form != FrozenForm::kInt8Blocks) {
    const bool is_narrow = form.form == FrozenForm::kBFloat16;
    View(resting, 0, is_narrow ? at::kBFloat16 : at::kByte, 1, form.values)
        .copy_(View(wide, 0, form.type, 1, form.values));
    return absl::OkStatus();
  }
  // Before anything is written: what cannot be held leaves what is there.
  const at::Tensor all = View(wide, 0, form.type, 1, form.values).to(at::kFloat);
  if (!std::isfinite(at::amax(at::abs(all)).item<float>())) {
    return absl::InvalidArgumentError(
        "has values that are not finite in float32, which FrozenForm::kInt8Blocks cannot hold: use "
        "kBFloat16 or kAsIs");
  }
  ForBlocks(resting, form, wide,
            [](const at::Tensor& scales, const at::Tensor& levels, const at::Tensor& weights) {
              const at::Tensor values = weights.to(at::kFloat);
              scales.copy_(at::amax(at::abs(values), 1, /*keepdim=*/true) / kMostInt8);
              // A block of zeros, or of what is next to nothing, has the scale 0.
              const at::Tensor divisors = at::where(scales == 0, 1, scales);
              levels.copy_(at::where(scales == 0, 0,
                                     (values / divisors).round().clamp(-kMostInt8, kMostInt8)));
            });
  return absl::OkStatus();
}

void Widen(const StoragePlace& resting, const RestingForm& form, const StoragePlace& wide) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (form.form != FrozenForm::kInt8Blocks) {
    const bool is_narrow = form.form == FrozenForm::kBFloat16;
    View(wide, 0, form.type, 1, form.values)
        .copy_(View(resting, 0, is_narrow ? at::kBFloat16 : at::kByte, 1, form.values));
    return;
  }
  ForBlocks(resting, form, wide,
            [](const at::Tensor& scales, const at::Tensor& levels, at::Tensor weights) {
              at::mul_out(weights, levels, scales);
            });
}

}  // namespace pinion
