// Shares one device-memory target between streamed weights (hooks/weights) and saved activations
// (hooks/activations).
//
//   // Weights:
//   share.Want({.least_bytes = largest, .enough_bytes = two_largest});
//   StreamedBytes bytes(share, model, size_bytes);   // lives longer than the allocation
//   // Activations, whose records exclude streamed bytes, and whose plans reserve the wanted bytes:
//   share.SetPeakBound(PeakBound{.most_bytes = plan.peak_bytes, .moves = true});
//
// Streamed bytes are those of streamed weights on the device.
//
// Thread safety: thread-safe, without a lock.
// Ownership: shared by the device's tier and its users.

#ifndef PINION_ENGINE_TIER_DEVICE_SHARE_H_
#define PINION_ENGINE_TIER_DEVICE_SHARE_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "pinion/engine/schedule/reservation.h"

namespace pinion {

// One model's weights on a device.
struct StreamedModel {
  std::atomic<uint64_t> current_bytes = 0;
  std::atomic<uint64_t> allocated_bytes = 0;  // total since the start, including freed memory
};

class DeviceShare {
 public:
  // Returns the bytes of streamed weights on the device, never less than they have allocated.
  uint64_t streamed_bytes() const { return streamed_bytes_.load(std::memory_order_relaxed); }

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
  }
  std::optional<PeakBound> peak_bound() const {
    const uint64_t bytes = peak_bound_.load(std::memory_order_relaxed);
    if (bytes == kNoPeakBound) return std::nullopt;
    return PeakBound{.most_bytes = bytes & ~kMoves, .moves = (bytes & kMoves) != 0};
  }

 private:
  friend class StreamedBytes;
  static constexpr uint64_t kNoPeakBound = UINT64_MAX;
  static constexpr uint64_t kMoves = uint64_t{1} << 63;

  std::atomic<uint64_t> streamed_bytes_ = 0;
  std::atomic<uint64_t> least_bytes_ = 0;
  std::atomic<uint64_t> enough_bytes_ = 0;
  std::atomic<uint64_t> peak_bound_ = kNoPeakBound;  // PeakBound in one word
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
  void CountAllocation() { model_->allocated_bytes += size_bytes_; }
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
