#include "pinion/bench/submit_cost.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <utility>

#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/null_device.h"
#include "pinion/bench/statistics.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion {
namespace {

// More than the engine queues before it queries the device, few enough for the cache.
constexpr int kSubmits = 64;

double WallMs() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

absl::StatusOr<std::unique_ptr<SubmitCost>> SubmitCost::Create(const BenchCase& of) {
  std::unique_ptr<SubmitCost> cost(new SubmitCost);
  cost->direction_ = of.flow == BenchFlow::kDeviceToHost ? CopyDirection::kDeviceToHost
                                                         : CopyDirection::kHostToDevice;
  cost->piece_bytes_ = of.piece_bytes;
  auto device = std::make_shared<NullDevice>(of.setting == BenchSetting::kEventsPending
                                                 ? NullDevice::Events::kPending
                                                 : NullDevice::Events::kDone);
  PINION_ASSIGN_OR_RETURN(const StreamHandle compute, device->CreateStream("compute"));
  PINION_ASSIGN_OR_RETURN(cost->world_, CopyWorld::Create(device, compute, WallMs));

  // Scattered pieces are apart and in random order, like tensors saved over time.
  const bool scattered = of.method == BenchMethod::kScattered;
  const uint64_t stride_bytes = of.piece_bytes * (scattered ? 2 : 1);
  PINION_ASSIGN_OR_RETURN(cost->device_memory_,
                          cost->world_->NewDeviceMemory(of.pieces * stride_bytes));
  for (uint64_t i = 0; i < of.pieces; ++i) {
    cost->device_pieces_.push_back(static_cast<char*>(cost->device_memory_.get()) +
                                   i * stride_bytes);
  }
  if (scattered) {
    std::shuffle(cost->device_pieces_.begin(), cost->device_pieces_.end(), std::mt19937_64(1));
  }
  for (int i = 0; i < kSubmits; ++i) {
    PINION_ASSIGN_OR_RETURN(std::shared_ptr<HostBuffer> host,
                            cost->world_->NewHostMemory(of.pieces * of.piece_bytes));
    cost->hosts_.push_back(std::move(host));
  }
  return cost;
}

absl::StatusOr<BenchTime> SubmitCost::Run() {
  std::vector<CopyBatch> batches;
  for (const std::shared_ptr<HostBuffer>& host : hosts_) {
    CopyBatch& batch = batches.emplace_back(direction_);
    for (size_t i = 0; i < device_pieces_.size(); ++i) {
      batch.Add(host, i * piece_bytes_, device_pieces_[i], piece_bytes_);
    }
  }
  std::vector<Transfer> transfers;
  transfers.reserve(batches.size());
  TransferEngine& engine = world_->engine();
  // Timed one by one: other programs interrupt some calls, which the median ignores.
  std::vector<double> times_ms;
  for (CopyBatch& batch : batches) {
    const double start_ms = WallMs();
    PINION_ASSIGN_OR_RETURN(Transfer transfer, engine.Submit(batch, world_->compute()));
    times_ms.push_back(WallMs() - start_ms);
    transfers.push_back(std::move(transfer));
  }
  PINION_RETURN_IF_ERROR(world_->SynchronizeAll());
  const double ms = Summarize(std::move(times_ms)).median;
  return BenchTime{.ms = ms, .host_ms = ms};
}

}  // namespace pinion
