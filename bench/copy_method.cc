#include "pinion/bench/copy_method.h"

#include <utility>

#include "absl/time/time.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion {
namespace {

constexpr absl::Duration kTimeout = absl::Minutes(1);

class LaneCopies : public CopyMethod {
 public:
  LaneCopies(CopyWorld& world, std::vector<CopyLane> lanes)
      : world_(world), lanes_(std::move(lanes)) {}

  absl::Status Verify() override {
    for (const CopyLane& lane : lanes_) PINION_RETURN_IF_ERROR(lane.Verify(world_));
    return absl::OkStatus();
  }

 protected:
  CopyWorld& world_;
  const std::vector<CopyLane> lanes_;
};

class RawCopies final : public LaneCopies {
 public:
  RawCopies(CopyWorld& world, std::vector<CopyLane> lanes, EventHandle order)
      : LaneCopies(world, std::move(lanes)), order_(order) {
    for (const CopyLane& lane : lanes_) pieces_.push_back(lane.Pieces());
  }
  ~RawCopies() override {
    if (absl::Status destroyed = world_.device().DestroyEvent(order_); !destroyed.ok()) {
      PINION_LOG(kWarning) << "an event was leaked: " << destroyed.message();
    }
  }

  absl::Status Submit(StreamHandle after) override {
    Device& device = world_.device();
    const bool ordered = after != world_.idle();
    if (ordered) PINION_RETURN_IF_ERROR(device.RecordEvent(order_, after));
    for (size_t i = 0; i < lanes_.size(); ++i) {
      const StreamHandle stream = world_.raw(lanes_[i].direction);
      if (ordered) PINION_RETURN_IF_ERROR(device.StreamWaitEvent(stream, order_));
      for (const CopyPiece& piece : pieces_[i]) {
        PINION_RETURN_IF_ERROR(device.CopyAsync(lanes_[i].direction, {&piece, 1}, stream));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Wait() override {
    for (const CopyLane& lane : lanes_) {
      PINION_RETURN_IF_ERROR(world_.device().SynchronizeStream(world_.raw(lane.direction)));
    }
    return absl::OkStatus();
  }

 private:
  const EventHandle order_;
  std::vector<std::vector<CopyPiece>> pieces_;
};

class EngineCopies final : public LaneCopies {
 public:
  EngineCopies(CopyWorld& world, std::vector<CopyLane> lanes)
      : LaneCopies(world, std::move(lanes)), last_(lanes_.size()) {}

  absl::Status Submit(StreamHandle after) override {
    for (size_t i = 0; i < lanes_.size(); ++i) {
      PINION_ASSIGN_OR_RETURN(last_[i], world_.engine().Submit(lanes_[i].Batch(), after));
    }
    return absl::OkStatus();
  }

  absl::Status Wait() override {
    for (const Transfer& transfer : last_) PINION_RETURN_IF_ERROR(transfer.Wait(kTimeout));
    return absl::OkStatus();
  }

 private:
  std::vector<Transfer> last_;
};

}  // namespace

absl::StatusOr<std::vector<CopyLane>> NewLanes(CopyWorld& world, const BenchCase& of) {
  std::vector<CopyLane> lanes;
  for (const auto& [flow, direction] :
       {std::pair(BenchFlow::kDeviceToHost, CopyDirection::kDeviceToHost),
        std::pair(BenchFlow::kHostToDevice, CopyDirection::kHostToDevice)}) {
    if (of.flow != flow && of.flow != BenchFlow::kDuplex) continue;
    PINION_ASSIGN_OR_RETURN(CopyLane lane, NewLane(world, direction, of.pieces, of.piece_bytes));
    PINION_RETURN_IF_ERROR(lane.Prepare(world));
    lanes.push_back(std::move(lane));
  }
  return lanes;
}

absl::StatusOr<std::unique_ptr<CopyMethod>> NewRawCopies(CopyWorld& world,
                                                         std::vector<CopyLane> lanes) {
  PINION_ASSIGN_OR_RETURN(const EventHandle order, world.device().CreateEvent());
  return std::make_unique<RawCopies>(world, std::move(lanes), order);
}

absl::StatusOr<std::unique_ptr<CopyMethod>> NewEngineCopies(CopyWorld& world,
                                                            std::vector<CopyLane> lanes) {
  return std::make_unique<EngineCopies>(world, std::move(lanes));
}

absl::StatusOr<BenchTime> TimeCopies(CopyWorld& world, CopyMethod& method, uint64_t transfers) {
  BenchTime time;
  const double start_ms = world.now_ms();
  for (uint64_t i = 0; i < transfers; ++i) {
    PINION_RETURN_IF_ERROR(method.Submit(world.idle()));
  }
  time.host_ms = world.now_ms() - start_ms;
  PINION_RETURN_IF_ERROR(method.Wait());
  time.ms = world.now_ms() - start_ms;
  return time;
}

}  // namespace pinion
