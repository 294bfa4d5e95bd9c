// A PinnedBacking that can fail on request, and a timeline whose tickets end in an error.
//
//   auto failing = std::make_shared<FailingBacking>();
//   failing->to_read = absl::DataLossError("the file is too short");
//
// Thread safety: set the failures while no call is under way.

#ifndef PINION_TESTS_ENGINE_TIER_FAILING_BACKING_H_
#define PINION_TESTS_ENGINE_TIER_FAILING_BACKING_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/tier/backing.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion::testing {

// Never advances, and fails every wait with the error, until Repair().
class BrokenTimeline final : public FenceTimeline {
 public:
  explicit BrokenTimeline(absl::Status error) : error_(std::move(error)) {}
  void Repair() { completed_ = UINT64_MAX; }

  uint64_t Completed() const noexcept override { return completed_; }
  void Poll() override {}
  absl::Status Wait(uint64_t value, absl::Duration) override {
    return Completed() >= value ? absl::OkStatus() : error_;
  }

 private:
  const absl::Status error_;
  std::atomic<uint64_t> completed_{0};
};

class FailingBacking final : public Backing {
 public:
  absl::Status reserve;                             // returned by Reserve unless OK
  absl::Status to_read;                             // returned by ToRead
  std::shared_ptr<BrokenTimeline> reads = nullptr;  // a ticket for the buffers, too

  absl::StatusOr<std::shared_ptr<ParcelPlace>> Reserve(const std::shared_ptr<PinnedAllocator>& pool,
                                                       uint64_t size_bytes) override {
    PINION_RETURN_IF_ERROR(reserve);
    PINION_ASSIGN_OR_RETURN(std::shared_ptr<ParcelPlace> place, pinned_.Reserve(pool, size_bytes));
    return std::make_unique<Place>(*this, std::move(place));
  }

 private:
  class Place final : public ParcelPlace {
   public:
    Place(const FailingBacking& backing, std::shared_ptr<ParcelPlace> place)
        : backing_(backing), place_(std::move(place)) {}

    std::shared_ptr<HostBuffer> ToWrite() override { return place_->ToWrite(); }
    void Written(const Transfer& copy_out) override { place_->Written(copy_out); }
    absl::StatusOr<std::shared_ptr<HostBuffer>> ToRead() override {
      PINION_RETURN_IF_ERROR(backing_.to_read);
      PINION_ASSIGN_OR_RETURN(std::shared_ptr<HostBuffer> buffer, place_->ToRead());
      if (backing_.reads != nullptr) buffer->AddTicket({backing_.reads, 1});
      return buffer;
    }

   private:
    const FailingBacking& backing_;
    const std::shared_ptr<ParcelPlace> place_;
  };

  PinnedBacking pinned_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_TIER_FAILING_BACKING_H_
