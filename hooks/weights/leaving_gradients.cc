#include "pinion/hooks/weights/leaving_gradients.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/link/packing.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/tier/torch_memory.h"

namespace pinion {
namespace {

constexpr char kCollecting[] = "copying gradients to the host";

}  // namespace

LeavingGradients::LeavingGradients(std::shared_ptr<DeviceTier> tier, size_t most_leaving,
                                   Deliver deliver)
    : tier_(std::move(tier)), most_leaving_(most_leaving), deliver_(std::move(deliver)) {}

void LeavingGradients::Put(LeavingGradient gradient, size_t in_unit) {
  const c10::Stream stream = CurrentStream(gradient.tensor.device());
  std::vector<Part> others;
  std::vector<Part> all;
  {
    MutexLock lock(mu_);
    if (!collected_.empty() && (collected_.front().gradient.unit != gradient.unit ||
                                collected_.front().stream != stream)) {
      others.swap(collected_);
    }
    collected_.push_back({.gradient = std::move(gradient), .stream = stream});
    if (collected_.size() == in_unit) all.swap(collected_);
  }
  if (!others.empty()) PutOut(std::move(others));
  if (!all.empty()) PutOut(std::move(all));
}

void LeavingGradients::PutOut(std::vector<Part> parts) {
  const uint32_t unit = parts.front().gradient.unit;
  // Delivers earlier gradients of the unit, so that the host holds two copies of them at most.
  while (SettleOldest(&unit)) {
  }
  uint64_t size_bytes = 0;
  for (Part& part : parts) {
    part.offset_bytes = size_bytes;
    size_bytes =
        AlignUp(size_bytes + ExtentOf(part.gradient.tensor).size_bytes(), kPackAlignmentBytes);
  }
  const BoundStream stream(parts.front().stream);
  absl::StatusOr<std::shared_ptr<Parcel>> parcel = tier_->NewParcel(size_bytes, stream.native);
  if (absl::IsResourceExhausted(parcel.status())) {
    const c10::StreamGuard guard(stream.torch);
    for (const auto& [gradient, made_by, offset_bytes] : parts) {
      deliver_(gradient.weight, gradient.epoch, gradient.tensor.cpu());
    }
    return;
  }
  ThrowIfError(parcel.status(), kCollecting);
  Departure departure;
  departure.parcel = *parcel;
  std::vector<ArrivedPart> arrived;
  for (const auto& [gradient, made_by, offset_bytes] : parts) {
    const at::Tensor& tensor = gradient.tensor;
    const StorageExtent extent = ExtentOf(tensor);
    c10::Storage storage = tensor.storage();
    RecordOnStream(storage, stream.torch);
    departure.pieces.push_back({static_cast<char*>(storage.mutable_data()) + extent.begin_bytes,
                                offset_bytes, extent.size_bytes()});
    departure.memory.push_back(TorchMemory(std::move(storage)));
    arrived.push_back({gradient.weight, gradient.epoch, offset_bytes, tensor.scalar_type(),
                       tensor.sizes().vec(), tensor.strides().vec()});
  }
  ThrowIfError(tier_->PutOut(absl::MakeSpan(&departure, 1)), kCollecting);
  parts.clear();
  std::shared_ptr<Parcel> evicted;
  {
    MutexLock lock(mu_);
    left_bytes_ += size_bytes;
    on_the_way_.push_back({*std::move(parcel), std::move(arrived), unit});
    const size_t count = on_the_way_.size();
    if (count > most_leaving_) evicted = on_the_way_[count - most_leaving_ - 1].parcel;
  }
  if (evicted != nullptr) const GuardedMemory freed = evicted->Evict();
}

bool LeavingGradients::SettleOldest(const uint32_t* unit) {
  Arrival oldest;
  {
    MutexLock lock(mu_);
    const bool is_wanted = unit == nullptr
                               ? !on_the_way_.empty()
                               : std::any_of(on_the_way_.begin(), on_the_way_.end(),
                                             [&](const Arrival& a) { return a.unit == *unit; });
    if (!is_wanted) return false;
    oldest = std::move(on_the_way_.front());
    on_the_way_.pop_front();
  }
  const absl::StatusOr<std::shared_ptr<HostBuffer>> buffer =
      oldest.parcel->ViewOnHost(absl::InfiniteDuration());
  ThrowIfError(buffer.status(), kCollecting);
  for (const ArrivedPart& part : oldest.parts) {
    deliver_(part.weight, part.epoch,
             at::from_blob(
                 static_cast<char*>((*buffer)->data()) + part.offset_bytes, part.sizes,
                 part.strides, [owner = *buffer](void*) {}, part.type));
  }
  return true;
}

void LeavingGradients::Settle() {
  std::vector<Part> rest;
  {
    MutexLock lock(mu_);
    rest.swap(collected_);
  }
  if (!rest.empty()) PutOut(std::move(rest));
  while (SettleOldest(nullptr)) {
  }
}

uint64_t LeavingGradients::left_bytes() const {
  MutexLock lock(mu_);
  return left_bytes_;
}

}  // namespace pinion
