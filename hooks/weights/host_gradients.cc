#include "pinion/hooks/weights/host_gradients.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <torch/nn/utils/clip_grad.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/host_buffer.h"
#include "pinion/engine/plan/pack_plan.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/tier/torch_memory.h"

namespace pinion {
namespace {

constexpr char kCollecting[] = "copying gradients to the host";

}  // namespace

HostGradients::HostGradients(std::shared_ptr<DeviceTier> tier, std::vector<TrainedWeight> weights,
                             size_t most_leaving)
    : tier_(std::move(tier)), most_leaving_(most_leaving) {
  std::map<uint32_t, size_t> in_unit;
  for (const TrainedWeight& weight : weights) ++in_unit[weight.unit];
  for (TrainedWeight& weight : weights) {
    weights_.push_back({std::move(weight.master), weight.unit, in_unit[weight.unit]});
  }
}

void HostGradients::Collect(size_t index, const at::Tensor& weight) {
  at::Tensor& grad = weight.mutable_grad();
  if (!grad.defined() || grad.requires_grad()) return;
  const at::NoGradGuard no_grad;
  if (grad.layout() == at::kStrided) grad = grad.resolve_conj().resolve_neg();
  const bool is_plain = grad.layout() == at::kStrided && grad.is_non_overlapping_and_dense();
  Part part = {.weight = index,
               .gradient = is_plain ? grad : grad.to_dense().contiguous(),
               .stream = CurrentStream(grad.device())};
  grad = at::Tensor();
  std::vector<Part> others;
  std::vector<Part> all;
  {
    MutexLock lock(mu_);
    const uint32_t unit = weights_[index].unit;
    if (!collected_.empty() && (weights_[collected_.front().weight].unit != unit ||
                                collected_.front().stream != part.stream)) {
      others.swap(collected_);
    }
    collected_.push_back(std::move(part));
    if (collected_.size() == weights_[index].in_unit) all.swap(collected_);
  }
  if (!others.empty()) PutOut(std::move(others));
  if (!all.empty()) PutOut(std::move(all));
}

void HostGradients::PutOut(std::vector<Part> parts) {
  const uint32_t unit = weights_[parts.front().weight].unit;
  // What came of the unit before is in host memory since long: so the host has two at most.
  while (SettleOldest(&unit)) {
  }
  uint64_t size_bytes = 0;
  for (Part& part : parts) {
    part.offset_bytes = size_bytes;
    size_bytes = AlignUp(size_bytes + ExtentOf(part.gradient).size_bytes(), kPackAlignmentBytes);
  }
  const BoundStream stream(parts.front().stream);
  absl::StatusOr<std::shared_ptr<Parcel>> parcel = tier_->NewParcel(size_bytes, stream.native);
  if (absl::IsResourceExhausted(parcel.status())) {
    const c10::StreamGuard guard(stream.torch);
    for (const Part& part : parts) AddToMaster(part.weight, part.gradient.cpu());
    return;
  }
  ThrowIfError(parcel.status(), kCollecting);
  Departure departure;
  departure.parcel = *parcel;
  for (const Part& part : parts) {
    const StorageExtent extent = ExtentOf(part.gradient);
    c10::Storage storage = part.gradient.storage();
    RecordOnStream(storage, stream.torch);
    departure.pieces.push_back({static_cast<char*>(storage.mutable_data()) + extent.begin_bytes,
                                part.offset_bytes, extent.size_bytes()});
    departure.memory.push_back(TorchMemory(std::move(storage)));
  }
  ThrowIfError(tier_->PutOut(absl::MakeSpan(&departure, 1)), kCollecting);
  std::vector<ArrivedPart> arrived;
  for (const Part& part : parts) {
    arrived.push_back({part.weight, part.offset_bytes, part.gradient.sizes().vec(),
                       part.gradient.strides().vec()});
  }
  parts.clear();
  std::shared_ptr<Parcel> oldest;
  {
    MutexLock lock(mu_);
    held_.push_back(*parcel);
    if (held_.size() > most_leaving_) {
      oldest = std::move(held_.front());
      held_.pop_front();
    }
    left_bytes_ += size_bytes;
    on_the_way_.push_back({*std::move(parcel), std::move(arrived), unit});
  }
  if (oldest != nullptr) const GuardedMemory freed = oldest->Evict();
}

bool HostGradients::SettleOldest(const uint32_t* unit) {
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
  AddToMasters(oldest);
  return true;
}

void HostGradients::AddToMasters(const Arrival& arrival) {
  const absl::StatusOr<std::shared_ptr<HostBuffer>> buffer =
      arrival.parcel->ViewOnHost(absl::InfiniteDuration());
  ThrowIfError(buffer.status(), kCollecting);
  for (const ArrivedPart& part : arrival.parts) {
    AddToMaster(part.weight, at::from_blob(
                                 static_cast<char*>((*buffer)->data()) + part.offset_bytes,
                                 part.sizes, part.strides, [owner = *buffer](void*) {},
                                 weights_[part.weight].master.scalar_type()));
  }
}

void HostGradients::AddToMaster(size_t weight, const at::Tensor& arrived) {
  const at::NoGradGuard no_grad;
  const at::Tensor& master = weights_[weight].master;
  if (!master.grad().defined()) {
    master.mutable_grad() = arrived;
    return;
  }
  master.mutable_grad().add_(arrived);
  // Two are read, one is written.
  tier_->engine().device().ChargeHostArithmetic(3 * arrived.nbytes());
}

void HostGradients::Settle() {
  std::vector<Part> rest;
  {
    MutexLock lock(mu_);
    rest.swap(collected_);
  }
  if (!rest.empty()) PutOut(std::move(rest));
  std::deque<std::shared_ptr<Parcel>> held;
  {
    MutexLock lock(mu_);
    held.swap(held_);
  }
  for (const std::shared_ptr<Parcel>& parcel : held) const GuardedMemory freed = parcel->Evict();
  while (SettleOldest(nullptr)) {
  }
}

double HostGradients::ClipNorm(double max_norm) {
  Settle();
  std::vector<at::Tensor> masters;
  uint64_t bytes = 0;
  for (const Master& weight : weights_) {
    if (!weight.master.grad().defined()) continue;
    masters.push_back(weight.master);
    bytes += weight.master.nbytes();
  }
  const double norm = torch::nn::utils::clip_grad_norm_(masters, max_norm);
  // The norm reads each gradient once, and scaling reads and writes it.
  tier_->engine().device().ChargeHostArithmetic(3 * bytes);
  return norm;
}

void HostGradients::Zero() {
  Settle();
  for (const Master& weight : weights_) weight.master.mutable_grad() = at::Tensor();
}

uint64_t HostGradients::left_bytes() const {
  MutexLock lock(mu_);
  return left_bytes_;
}

}  // namespace pinion
