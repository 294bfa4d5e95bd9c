// Shares one device-memory target between streamed weights (hooks/weights) and saved activations
// (hooks/activations).
//
//   // Weights:
//   share.Want({.least_bytes = largest, .enough_bytes = two_largest});
//   VisitingBytes bytes(share, visitor, size_bytes);   // lives longer than the allocation
//   // Activations, whose records exclude visiting bytes, and whose plans reserve the wanted bytes:
//   share.Promise(StepPromise{.most_bytes = plan.peak_bytes, .moves = true});
//
// Visiting bytes are those of streamed weights on the device.
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

#include "pinion/engine/schedule/set_aside.h"

namespace pinion {

// One model's weights on a device.
struct Visitor {
  std::atomic<uint64_t> current_bytes = 0;
  std::atomic<uint64_t> allocated_bytes = 0;  // total since the start, including freed memory
};

class DeviceShare {
 public:
  // Returns the bytes of streamed weights on the device, never less than they have allocated.
  uint64_t visiting_bytes() const { return visiting_bytes_.load(std::memory_order_relaxed); }

  // Returns the sum of the bytes that all models' weights want a plan to reserve.
  SetAside wanted() const {
    // Another thread's Want may have added only least_bytes so far.
    const uint64_t least_bytes = least_bytes_.load();
    return {least_bytes, std::max(least_bytes, enough_bytes_.load())};
  }
  void Want(const SetAside& bytes) {
    least_bytes_ += bytes.least_bytes;
    enough_bytes_ += bytes.enough_bytes;
  }
  void WantNoMore(const SetAside& bytes) {
    least_bytes_ -= bytes.least_bytes;
    enough_bytes_ -= bytes.enough_bytes;
  }

  // Announces the most that other memory takes in the running step; nullopt: unknown.
  void Promise(const std::optional<StepPromise>& promise) {
    const uint64_t bytes = !promise.has_value() ? kNotPromised
                           : promise->moves     ? promise->most_bytes | kMoves
                                                : promise->most_bytes;
    promise_.store(bytes, std::memory_order_relaxed);
  }
  std::optional<StepPromise> promise() const {
    const uint64_t bytes = promise_.load(std::memory_order_relaxed);
    if (bytes == kNotPromised) return std::nullopt;
    return StepPromise{.most_bytes = bytes & ~kMoves, .moves = (bytes & kMoves) != 0};
  }

 private:
  friend class VisitingBytes;
  static constexpr uint64_t kNotPromised = UINT64_MAX;
  static constexpr uint64_t kMoves = uint64_t{1} << 63;

  std::atomic<uint64_t> visiting_bytes_ = 0;
  std::atomic<uint64_t> least_bytes_ = 0;
  std::atomic<uint64_t> enough_bytes_ = 0;
  std::atomic<uint64_t> promise_ = kNotPromised;  // StepPromise in one word
};

// Counts bytes of a visitor as long as the object lives.
class VisitingBytes {
 public:
  VisitingBytes() = default;  // none
  VisitingBytes(std::shared_ptr<DeviceShare> share, std::shared_ptr<Visitor> visitor,
                uint64_t size_bytes)
      : share_(std::move(share)), visitor_(std::move(visitor)), size_bytes_(size_bytes) {
    share_->visiting_bytes_ += size_bytes_;
    visitor_->current_bytes += size_bytes_;
  }
  VisitingBytes(VisitingBytes&& other) noexcept = default;
  VisitingBytes& operator=(VisitingBytes&& other) noexcept {
    std::swap(share_, other.share_);
    std::swap(visitor_, other.visitor_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }
  // Counts the bytes as allocated. Call it after the allocation succeeded.
  void CountAllocation() { visitor_->allocated_bytes += size_bytes_; }
  ~VisitingBytes() {
    if (share_ == nullptr) return;
    share_->visiting_bytes_ -= size_bytes_;
    visitor_->current_bytes -= size_bytes_;
  }

 private:
  std::shared_ptr<DeviceShare> share_;
  std::shared_ptr<Visitor> visitor_;
  uint64_t size_bytes_ = 0;
};

}  // namespace pinion

#endif  // PINION_ENGINE_TIER_DEVICE_SHARE_H_
