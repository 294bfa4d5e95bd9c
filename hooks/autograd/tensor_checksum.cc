#include "pinion/hooks/autograd/tensor_checksum.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "pinion/device/allocation_bytes.h"
#include "pinion/device/allocation_label.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

constexpr uint64_t kWordBytes = 8;
constexpr uint64_t kChunkBytes = uint64_t{4} << 20;

// The odd constants of the splitmix64 generator.
constexpr uint64_t kStep = 0x9E3779B97F4A7C15;
constexpr uint64_t kMix1 = 0xBF58476D1CE4E5B9;
constexpr uint64_t kMix2 = 0x94D049BB133111EB;

int64_t Signed(uint64_t value) { return static_cast<int64_t>(value); }

at::Tensor Words(const c10::Storage& storage, uint64_t begin_bytes, uint64_t size_bytes) {
  const bool aligned =
      (reinterpret_cast<uintptr_t>(storage.data()) + begin_bytes) % kWordBytes == 0 &&
      begin_bytes % kWordBytes == 0;
  if (aligned && size_bytes % kWordBytes == 0) {
    return ViewOfStorage(storage, at::kLong, begin_bytes, size_bytes);
  }
  const at::Tensor bytes = ViewOfStorage(storage, at::kByte, begin_bytes, size_bytes);
  const uint64_t padded_bytes = (size_bytes + kWordBytes - 1) / kWordBytes * kWordBytes;
  at::Tensor padded = at::zeros({Signed(padded_bytes)}, bytes.options());
  padded.narrow(0, 0, Signed(size_bytes)).copy_(bytes);
  return padded.view(at::kLong);
}

// x ^ (x >> bits) of unsigned words. The tensor's shift is signed, hence the mask.
void XorShift(at::Tensor& words, int bits) {
  const uint64_t kept = ~uint64_t{0} >> bits;
  words.bitwise_xor_(words.bitwise_right_shift(bits).bitwise_and_(Signed(kept)));
}

// Sums the words, each mixed with its index. For a fixed index the mixing is a bijection.
at::Tensor MixedSum(const at::Tensor& words, int64_t first_index) {
  at::Tensor mixed = at::arange(first_index, first_index + words.numel(), words.options());
  mixed.mul_(Signed(kStep)).add_(words);
  XorShift(mixed, 30);
  mixed.mul_(Signed(kMix1));
  XorShift(mixed, 27);
  mixed.mul_(Signed(kMix2));
  XorShift(mixed, 31);
  return mixed.sum();
}

}  // namespace

TensorChecksum TensorChecksum::Of(const c10::Storage& storage, const StorageExtent& extent) {
  const c10::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const AllocationLabel label("checksums of Pinion's verify mode");
  TensorChecksum checksum;
  checksum.stream_ = CurrentStream(storage.device());
  checksum.sum_ = at::zeros({}, at::TensorOptions(at::kLong).device(storage.device()));
  for (uint64_t done = 0; done < extent.size_bytes(); done += kChunkBytes) {
    const uint64_t size_bytes = std::min(kChunkBytes, extent.size_bytes() - done);
    checksum.sum_.add_(
        MixedSum(Words(storage, extent.begin_bytes + done, size_bytes), Signed(done / kWordBytes)));
  }
  return checksum;
}

uint64_t TensorChecksum::MostBytes(size_t extents, uint64_t largest_bytes) {
  // The mixed words, a shifted and a masked copy, and the padded bytes or a sum.
  constexpr uint64_t kCopies = 4;
  const uint64_t chunk_bytes = AllocationBytes(std::min(kChunkBytes, largest_bytes));
  return extents * AllocationBytes(kWordBytes) + kCopies * chunk_bytes;
}

uint64_t TensorChecksum::value() const {
  TORCH_CHECK(sum_.defined(), "the checksum of nothing has no value");
  const c10::StreamGuard guard(*stream_);
  return static_cast<uint64_t>(sum_.item<int64_t>());
}

}  // namespace pinion
