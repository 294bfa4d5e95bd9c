#include "pinion/bench/packed_copy.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion {
namespace {

at::Tensor NewBytes(c10::Device device, uint64_t size_bytes) {
  return at::empty({static_cast<int64_t>(size_bytes)}, at::device(device).dtype(at::kByte));
}

// Makes the tensor's memory the lane's device memory.
void UseMemoryOf(const at::Tensor& tensor, CopyLane& lane) {
  lane.device = std::shared_ptr<void>(tensor.data_ptr(), [tensor](void*) {});
}

class PackedCopies : public CopyMethod {
 public:
  PackedCopies(CopyWorld& world, CopyLane lane) : world_(world), lane_(std::move(lane)) {}

  absl::Status Wait() override { return transfer_.Wait(absl::Minutes(1)); }
  absl::Status Verify() override { return lane_.Verify(world_); }

 protected:
  // Copies between the host's memory and `packed` as one piece.
  absl::Status SubmitPacked(const at::Tensor& packed) {
    CopyBatch batch(lane_.direction);
    batch.Add(lane_.host, 0, packed.data_ptr(), lane_.size_bytes());
    PINION_ASSIGN_OR_RETURN(transfer_, world_.engine().Submit(batch, world_.compute()));
    return absl::OkStatus();
  }

  CopyWorld& world_;
  CopyLane lane_;

 private:
  Transfer transfer_;
};

class PackedOut final : public PackedCopies {
 public:
  PackedOut(CopyWorld& world, CopyLane lane, std::vector<at::Tensor> pieces)
      : PackedCopies(world, std::move(lane)), pieces_(std::move(pieces)) {}

  // The pieces always come from the compute stream.
  absl::Status Submit(StreamHandle after) override {
    packed_ = at::cat(pieces_);
    return SubmitPacked(packed_);
  }

 private:
  const std::vector<at::Tensor> pieces_;
  at::Tensor packed_;
};

class PackedIn final : public PackedCopies {
 public:
  PackedIn(CopyWorld& world, CopyLane lane, c10::Device device)
      : PackedCopies(world, std::move(lane)), device_(device) {}

  // The measured time includes allocating the pieces and making their views; a loop's pieces exist.
  absl::Status Submit(StreamHandle after) override {
    const at::Tensor packed = NewBytes(device_, lane_.size_bytes());
    UseMemoryOf(packed, lane_);
    PINION_RETURN_IF_ERROR(SubmitPacked(packed));
    pieces_ = packed.view({static_cast<int64_t>(lane_.pieces), -1}).unbind();
    return absl::OkStatus();
  }

 private:
  const c10::Device device_;
  std::vector<at::Tensor> pieces_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CopyMethod>> NewPackedCopies(CopyWorld& world, c10::Device device,
                                                            const BenchCase& of) {
  const bool out = of.flow == BenchFlow::kDeviceToHost;
  PINION_ASSIGN_OR_RETURN(
      CopyLane lane,
      NewLane(world, out ? CopyDirection::kDeviceToHost : CopyDirection::kHostToDevice, of.pieces,
              of.piece_bytes));
  if (out) {
    const at::Tensor memory = NewBytes(device, lane.pieces * lane.device_stride_bytes);
    UseMemoryOf(memory, lane);
    PINION_RETURN_IF_ERROR(lane.Prepare(world));
    std::vector<at::Tensor> pieces = memory.view({static_cast<int64_t>(lane.pieces), -1})
                                         .narrow(1, 0, static_cast<int64_t>(lane.piece_bytes))
                                         .unbind();
    return std::make_unique<PackedOut>(world, std::move(lane), std::move(pieces));
  }
  lane.device_stride_bytes = lane.piece_bytes;
  PINION_RETURN_IF_ERROR(lane.Prepare(world));
  lane.device = nullptr;
  return std::make_unique<PackedIn>(world, std::move(lane), device);
}

}  // namespace pinion
