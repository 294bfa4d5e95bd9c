// Shares one device-memory target between streamed weights (hooks/weights) and saved activations
// (hooks/activations).
//
//   // Weights:
//   share.Want({.least_bytes = largest, .enough_bytes = two_largest});
//   StreamedBytes bytes(share, model, size_bytes);   // lives longer than the allocation
//   // Activations, whose records exclude streamed bytes, and whose plans reserve the wanted bytes:
//   share.SetPeakBound(PeakBound{.most_bytes = plan.peak_bytes, .moves = true});
//   share.EvictIdleWeights(/*most_bytes=*/target - step);
//
// Streamed bytes are those of streamed weights on the device.
//
// Thread safety: thread-safe.
// Ownership: shared by the device's tier and its users.

#ifndef PINION_ENGINE_TIER_DEVICE_SHARE_H_
#define PINION_ENGINE_TIER_DEVICE_SHARE_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/schedule/reservation.h"

namespace pinion {

// One model's weights on a device.
struct StreamedModel {
  std::atomic<uint64_t> current_bytes = 0;
};

// Streamed weights that other users of the device can evict.
class EvictableWeights {
 public:
  virtual ~EvictableWeights() = default;
  // Evicts the units that no operator uses, and frees their memory. With `unless_in_use`, evicts
  // none while an operator uses another unit of the model. Called with no lock held.
  virtual void EvictIdle(bool unless_in_use) = 0;
};

class DeviceShare {
 public:
  // Returns the bytes of streamed weights on the device, never less than they have allocated.
  uint64_t streamed_bytes() const { return streamed_bytes_.load(std::memory_order_relaxed); }
  // Returns the bytes that streamed weights have allocated since the start, including freed memory.
  uint64_t allocated_bytes() const { return allocated_bytes_.load(std::memory_order_relaxed); }

  // EvictIdleWeights finds the weights as long as they live.
  void Register(const std::weak_ptr<EvictableWeights>& weights) {
    MutexLock lock(mu_);
    std::erase_if(weights_, [](const auto& one) { return one.expired(); });
    weights_.push_back(weights);
  }
  // Evicts idle weights, one model after the other, while streamed weights exceed `most_bytes`.
  // Skips the model `except`.
  void EvictIdleWeights(uint64_t most_bytes, bool unless_in_use = false,
                        const EvictableWeights* except = nullptr) {
    if (streamed_bytes() <= most_bytes) return;
    std::vector<std::weak_ptr<EvictableWeights>> all;
    {
      MutexLock lock(mu_);
      all = weights_;
    }
    for (const std::weak_ptr<EvictableWeights>& one : all) {
      if (streamed_bytes() <= most_bytes) return;
      const std::shared_ptr<EvictableWeights> weights = one.lock();
      if (weights != nullptr && weights.get() != except) weights->EvictIdle(unless_in_use);
    }
  }

  // Returns the sum of the bytes that all models' weights want a plan to reserve.
  Reservation wanted() const {
    // Another thread's Want may have added only least_bytes so far.
    const uint64_t least_bytes = least_bytes_.load();
    return {least_bytes, std::max(least_bytes, enough_bytes_.load())};
  }
  void Want(const Reservation& bytes) {
    least_bytes_ += bytes.least_bytes;
    enough_bytes_ += bytes.enough_bytes;
  }
  void WantNoMore(const Reservation& bytes) {
    least_bytes_ -= bytes.least_bytes;
    enough_bytes_ -= bytes.enough_bytes;
  }

  // Announces the most that other memory takes in the running step; nullopt: unknown.
  void SetPeakBound(const std::optional<PeakBound>& peak_bound) {
    const uint64_t bytes = !peak_bound.has_value() ? kNoPeakBound
                           : peak_bound->moves     ? peak_bound->most_bytes | kMoves
                                                   : peak_bound->most_bytes;
    peak_bound_.store(bytes, std::memory_order_relaxed);
    if (!peak_bound.has_value()) used_last_ = nullptr;
  }
  // An operator uses the weights, whose window leaves the peak bound free.
  void OnUse(const EvictableWeights* weights) {
    if (peak_bound().has_value()) used_last_ = weights;
  }
  // Returns the weights that were used last since there is a peak bound, or null. Compare only.
  const EvictableWeights* used_last() const { return used_last_; }
  std::optional<PeakBound> peak_bound() const {
    const uint64_t bytes = peak_bound_.load(std::memory_order_relaxed);
    if (bytes == kNoPeakBound) return std::nullopt;
    return PeakBound{.most_bytes = bytes & ~kMoves, .moves = (bytes & kMoves) != 0};
  }

 private:
  friend class StreamedBytes;
  static constexpr uint64_t kNoPeakBound = UINT64_MAX;
  static constexpr uint64_t kMoves = uint64_t{1} << 63;

  Mutex mu_;
  std::vector<std::weak_ptr<EvictableWeights>> weights_ ABSL_GUARDED_BY(mu_);
  std::atomic<uint64_t> streamed_bytes_ = 0;
  std::atomic<uint64_t> allocated_bytes_ = 0;
  std::atomic<uint64_t> least_bytes_ = 0;
  std::atomic<uint64_t> enough_bytes_ = 0;
  std::atomic<uint64_t> peak_bound_ = kNoPeakBound;  // PeakBound in one word
  std::atomic<const EvictableWeights*> used_last_ = nullptr;
};

// Counts bytes of a model as long as the object lives.
class StreamedBytes {
 public:
  StreamedBytes() = default;  // none
  StreamedBytes(std::shared_ptr<DeviceShare> share, std::shared_ptr<StreamedModel> model,
                uint64_t size_bytes)
      : share_(std::move(share)), model_(std::move(model)), size_bytes_(size_bytes) {
    share_->streamed_bytes_ += size_bytes_;
    model_->current_bytes += size_bytes_;
  }
  StreamedBytes(StreamedBytes&& other) noexcept = default;
  StreamedBytes& operator=(StreamedBytes&& other) noexcept {
    std::swap(share_, other.share_);
    std::swap(model_, other.model_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }
  // Counts the bytes as allocated. Call it after the allocation succeeded.
  void CountAllocation() { share_->allocated_bytes_ += size_bytes_; }
  ~StreamedBytes() {
    if (share_ == nullptr) return;
    share_->streamed_bytes_ -= size_bytes_;
    model_->current_bytes -= size_bytes_;
  }

 private:
  std::shared_ptr<DeviceShare> share_;
  std::shared_ptr<StreamedModel> model_;
  uint64_t size_bytes_ = 0;
};

}  // namespace pinion

#endif  // PINION_ENGINE_TIER_DEVICE_SHARE_H_
