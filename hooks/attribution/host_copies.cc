#include "pinion/hooks/attribution/host_copies.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/MemoryFormat.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/tier/torch_memory.h"

namespace pinion {
namespace {

constexpr char kCopying[] = "copying a layer's tensor to the host";

// Returns `tensor`, or a copy if its storage is larger or may be overwritten.
at::Tensor OnItsOwn(const at::Tensor& tensor, HostCopies::Source source) {
  const at::Tensor plain = tensor.resolve_conj().resolve_neg();
  const bool is_part = plain.storage().nbytes() > plain.nbytes();
  if (is_part) return plain.clone(at::MemoryFormat::Contiguous);
  const bool is_copied = !plain.is_alias_of(tensor);
  return source == HostCopies::Source::kStays || is_copied ? plain : plain.clone();
}

}  // namespace

at::Tensor HostCopy::Wait() const {
  if (parcel_ == nullptr) return tensor_;
  absl::StatusOr<std::shared_ptr<HostBuffer>> buffer =
      parcel_->ViewOnHost(absl::InfiniteDuration());
  ThrowIfError(buffer.status(), kCopying);
  void* const data = (*buffer)->data();
  const at::Tensor tensor = at::from_blob(
      data, sizes_, strides_, [owner = *std::move(buffer)](void*) {}, dtype_);
  // An expanded tensor was transferred compactly; here each element gets its own memory.
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}

HostCopies::HostCopies(std::shared_ptr<HostTier> tier, c10::DeviceType type)
    : tier_(std::move(tier)), type_(type) {}

HostCopies::~HostCopies() {
  for (const auto& [index, held] : held_) {
    for (const auto& parcel : held.parcels) const GuardedMemory freed = parcel->Evict();
  }
}

bool HostCopies::CanTake(const at::Tensor& tensor) const {
  if (!IsQueued(tensor) || !tensor.has_storage()) return false;
  const c10::Storage& storage = tensor.storage();
  // A storage without allocator is from_blob's, whose owner may write to it. A tensor that requires
  // gradients may be referenced by the graph, as a leaf or through its hooks.
  return !tensor.requires_grad() && tensor.use_count() == 1 && storage.use_count() == 1 &&
         storage.allocator() != nullptr && storage.nbytes() == tensor.nbytes() &&
         tensor.is_non_overlapping_and_dense();
}

HostCopy HostCopies::Start(const at::Tensor& tensor, Source source) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK(tensor.layout() == at::kStrided, "attribution copies strided tensors alone, and not ",
              tensor.layout(), ": tap its values");
  const c10::Device device = tensor.device();
  TORCH_CHECK(device.is_cpu() || device.type() == type_, "the session was made for \"",
              c10::DeviceTypeName(type_, /*lower_case=*/true), "\", and the tensor is on ", device,
              ": create the session with the backend of that device");
  if (!IsQueued(tensor)) {
    return HostCopy(tensor.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  }
  // An expanded tensor occupies only the bytes that it was expanded from.
  MakeRoom(device, std::min(tensor.nbytes(), tensor.storage().nbytes()));
  const absl::StatusOr<std::shared_ptr<DeviceTier>> device_tier = tier_->ForDevice(device.index());
  ThrowIfError(device_tier.status(), "setting up a device's tier");
  const at::Tensor own = OnItsOwn(tensor.detach(), source);
  const BoundStream stream(CurrentStream(device));
  const StorageExtent extent = ExtentOf(own);
  absl::StatusOr<std::shared_ptr<Parcel>> parcel =
      (*device_tier)->NewParcel(extent.size_bytes(), stream.native);
  ThrowIfError(parcel.status(), kCopying);
  c10::Storage storage = own.storage();
  RecordOnStream(storage, stream.torch);
  Departure departure;
  departure.parcel = *parcel;
  departure.pieces = {
      {static_cast<char*>(storage.mutable_data()) + extent.begin_bytes, 0, extent.size_bytes()}};
  departure.memory.push_back(TorchMemory(std::move(storage)));
  ThrowIfError((*device_tier)->PutOut(absl::MakeSpan(&departure, 1)), kCopying);
  {
    const MutexLock lock(mu_);
    Held& held = held_[device.index()];
    held.parcels.push_back(*parcel);
    held.bytes += (*parcel)->size_bytes;
  }
  HostCopy copy;
  copy.parcel_ = *std::move(parcel);
  copy.sizes_ = own.sizes().vec();
  copy.strides_ = own.strides().vec();
  copy.dtype_ = own.scalar_type();
  return copy;
}

// One copy is on the link while another one waits, so that bursts rarely stall the device.
void HostCopies::MakeRoom(c10::Device device, uint64_t next_bytes) {
  std::vector<std::shared_ptr<Parcel>> oldest;
  {
    const MutexLock lock(mu_);
    Held& held = held_[device.index()];
    if (next_bytes > held.largest_bytes) {
      held.second_bytes = std::exchange(held.largest_bytes, next_bytes);
    } else {
      held.second_bytes = std::max(held.second_bytes, next_bytes);
    }
    while (held.bytes + next_bytes > held.largest_bytes + held.second_bytes) {
      oldest.push_back(std::move(held.parcels.front()));
      held.parcels.pop_front();
      held.bytes -= oldest.back()->size_bytes;
    }
  }
  for (const std::shared_ptr<Parcel>& parcel : oldest) const GuardedMemory freed = parcel->Evict();
}

uint64_t HostCopies::HeldBytes() const {
  const MutexLock lock(mu_);
  uint64_t most_bytes = 0;
  for (const auto& [index, held] : held_) most_bytes = std::max(most_bytes, held.bytes);
  return most_bytes;
}

at::Tensor HostCopies::Concatenate(const std::vector<at::Tensor>& pieces) const {
  const at::Tensor& first = pieces.front();
  if (pieces.size() == 1) return first;
  int64_t rows = 0;
  bool is_plain = tier_ != nullptr && first.is_cpu() && first.dim() > 0;
  for (const at::Tensor& piece : pieces) {
    is_plain = is_plain && piece.scalar_type() == first.scalar_type() &&
               piece.dim() == first.dim() && piece.sizes().slice(1) == first.sizes().slice(1);
    if (is_plain) rows += piece.size(0);
  }
  std::vector<int64_t> sizes = first.sizes().vec();
  if (is_plain) sizes.front() = rows;
  // at::cat also raises the errors for pieces that do not fit each other.
  if (!is_plain || c10::multiply_integers(sizes) == 0) return at::cat(pieces);
  absl::StatusOr<PinnedBlock> block = tier_->pool().Allocate(
      static_cast<uint64_t>(c10::multiply_integers(sizes)) * first.itemsize());
  ThrowIfError(block.status(), "concatenating the parts of a layer");
  void* const data = block->data();
  auto owner = std::make_shared<PinnedBlock>(*std::move(block));
  at::Tensor all = at::from_blob(
      data, sizes, [owner = std::move(owner)](void*) {}, first.scalar_type());
  at::cat_out(all, pieces);
  return all;
}

}  // namespace pinion
