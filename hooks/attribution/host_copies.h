// Copies layers' tensors from devices to pinned host memory asynchronously, through the shared
// tiers (engine/tier/host_tier.h). Per device, tensors whose copies are pending take at most the
// bytes of the two largest ones; Start evicts the oldest if needed.
//
//   HostCopies copies(tier, c10::DeviceType::CUDA);
//   HostCopy copy = copies.Start(activation, HostCopies::Source::kMayChange);
//   ...
//   at::Tensor on_host = copy.Wait();
//
// LibTorch copies tensors that are already on the host, and all tensors if there is no tier
// (PINION_DISABLE). Such a copy is complete when Start returns.
//
// Thread safety: HostCopies is thread-safe; a HostCopy is a value.
// Ownership: the tensor that Wait returns owns its pinned memory.
// Errors: c10::Error for tensors on another kind of accelerator, tensors that are not strided, and
// failed copies; c10::OutOfMemoryError when the budget for pinned memory is exhausted.

#ifndef PINION_HOOKS_ATTRIBUTION_HOST_COPIES_H_
#define PINION_HOOKS_ATTRIBUTION_HOST_COPIES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/engine/tier/parcel.h"

namespace pinion {

class HostCopy {
 public:
  HostCopy() = default;  // an undefined tensor
  // No copy: Wait returns `tensor` at once.
  explicit HostCopy(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  // Blocks until the copy is complete and returns the tensor on the host.
  at::Tensor Wait() const;

 private:
  friend class HostCopies;

  at::Tensor tensor_;               // if there is no parcel
  std::shared_ptr<Parcel> parcel_;  // the copy's bytes, with the tensor's geometry below
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  at::ScalarType dtype_ = at::kFloat;
};

class HostCopies {
 public:
  // Whether the caller may write to the tensor while its copy is pending.
  enum class Source {
    kMayChange,  // Start copies the tensor on the device first
    kStays,      // the copy reads the tensor itself
  };

  // Takes a `tier` for devices of this type, or null: then LibTorch copies.
  HostCopies(std::shared_ptr<HostTier> tier, c10::DeviceType type);
  ~HostCopies();  // frees the device memory held for copies, in stream order

  // Returns whether `tensor` is the only owner of its memory and needs no gradient. If so, the
  // caller may start a kStays copy and go on with a clone; weak references to the storage must not
  // write to it. Call this on the thread that owns `tensor`.
  bool CanTake(const at::Tensor& tensor) const;
  // Starts a copy of `tensor` behind the work queued on the current stream of its device.
  HostCopy Start(const at::Tensor& tensor, Source source);

  // Returns the device bytes held for copies, on the device that holds most.
  uint64_t HeldBytes() const;

  // Concatenates tensors of one device on dimension 0; on the host in the tier's pinned memory if
  // they have one dtype. Returns a single piece as it is. `pieces` must not be empty.
  at::Tensor Concatenate(const std::vector<at::Tensor>& pieces) const;

 private:
  // Copies that hold memory of one device.
  struct Held {
    std::deque<std::shared_ptr<Parcel>> parcels;  // the oldest first
    uint64_t bytes = 0;                           // of `parcels`
    // The two largest copies that Start was asked for on this device.
    uint64_t largest_bytes = 0;
    uint64_t second_bytes = 0;
  };

  bool IsQueued(const at::Tensor& tensor) const {
    return tier_ != nullptr && !tensor.is_cpu() && tensor.numel() > 0;
  }
  // Evicts the oldest copies until `next_bytes` more fit the bound.
  void MakeRoom(c10::Device device, uint64_t next_bytes);

  const std::shared_ptr<HostTier> tier_;
  const c10::DeviceType type_;

  mutable Mutex mu_;
  std::map<int, Held> held_ ABSL_GUARDED_BY(mu_);  // by device
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_HOST_COPIES_H_
