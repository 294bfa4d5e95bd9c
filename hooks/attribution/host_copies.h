// Tensors on their way from devices to the host, through the tiers that all tenants share
// (engine/tier/host_tier.h): of each device no more is held there for copies than the two largest
// of them take, since the next one first lets go of the oldest ones.
//
//   HostCopies copies(tier, c10::DeviceType::CUDA);
//   HostCopy copy = copies.Start(activation, HostCopies::Source::kMayChange);
//   ...
//   at::Tensor on_host = copy.Wait();
//
// Where there is no tier (PINION_DISABLE), and for tensors that are in host memory already, a copy
// is LibTorch's own and done when Start returns.
//
// Thread safety: HostCopies is thread-safe; a HostCopy is a value.
// Ownership: what Wait returns owns its pinned memory.
// Errors: c10::Error, where the tensor is on another kind of accelerator, is not strided, or cannot
// be copied; c10::OutOfMemoryError where the budget for pinned memory has no room.

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
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/engine/tier/parcel.h"

namespace pinion {

class HostCopy {
 public:
  HostCopy() = default;  // of nothing
  // Blocks until the bytes are there.
  at::Tensor Wait() const;

 private:
  friend class HostCopies;

  at::Tensor tensor_;               // on the host already, or:
  std::shared_ptr<Parcel> parcel_;  // where it is, and what it is a tensor of
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  at::ScalarType dtype_ = at::kFloat;
};

class HostCopies {
 public:
  // What becomes of the tensor while its copy is under way.
  enum class Source {
    kMayChange,  // copied on the device first
    kStays,      // the copy reads the tensor itself
  };

  // `tier`, of devices of this type, may be null.
  HostCopies(std::shared_ptr<HostTier> tier, c10::DeviceType type);
  ~HostCopies();  // frees the device memory that is held for copies, in the order of its stream

  // Whether no other tensor, view or owner has the memory of `tensor`, and no gradient is asked for
  // it. Then the caller may let a kStays copy read it and go on with a clone. Who has a weak
  // reference to its storage must not write through that. Called on the thread that owns `tensor`.
  bool CanTake(const at::Tensor& tensor) const;
  // The copy comes after the present work of the current stream of the tensor's device.
  HostCopy Start(const at::Tensor& tensor, Source source);

  // Of the device where it is most: what is held there now.
  uint64_t HeldBytes() const;

  // Tensors on the host behind each other on dimension 0, in pinned memory of the tier's if they
  // are of one dtype. Not empty.
  at::Tensor Concatenate(const std::vector<at::Tensor>& pieces);

 private:
  // What is held on one device.
  struct Held {
    std::deque<std::shared_ptr<Parcel>> parcels;  // the oldest first
    uint64_t bytes = 0;                           // of those
    // Of all that this device has been asked to copy.
    uint64_t largest_bytes = 0;
    uint64_t second_bytes = 0;
  };

  bool IsQueued(const at::Tensor& tensor) const {
    return tier_ != nullptr && !tensor.is_cpu() && tensor.numel() > 0;
  }
  // Lets go of the oldest ones that are held on the device, until one more may be.
  void MakeRoom(c10::Device device, uint64_t next_bytes);

  const std::shared_ptr<HostTier> tier_;
  const c10::DeviceType type_;

  mutable Mutex mu_;
  std::map<int, Held> held_ ABSL_GUARDED_BY(mu_);  // by device
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_HOST_COPIES_H_
