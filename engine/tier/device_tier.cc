#include "pinion/engine/tier/device_tier.h"

#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/copy_batch.h"

namespace pinion {

namespace {

// Measuring allocates and waits, which would break a graph that `stream` captures.
absl::StatusOr<LinkCalibration> MeasureLink(TransferEngine& engine, PinnedAllocator& pool,
                                            StreamHandle stream) {
  PINION_ASSIGN_OR_RETURN(const bool capturing, engine.IsCapturing(stream));
  if (capturing) {
    return absl::FailedPreconditionError(
        "a graph is being captured; call OffloadSession::Reserve before the capture");
  }
  return engine.Calibrate(pool);
}

}  // namespace

DeviceTier::DeviceTier(std::shared_ptr<TransferEngine> engine,
                       std::shared_ptr<PinnedAllocator> pool)
    : engine_(std::move(engine)), pool_(std::move(pool)) {
  PINION_CHECK(engine_ != nullptr && pool_ != nullptr)
      << "a DeviceTier needs an engine and a pool: HostTier::ForDevice makes one";
}

LinkCalibration DeviceTier::Link(StreamHandle stream) const {
  const absl::StatusOr<LinkCalibration> link = MeasureLink(*engine_, *pool_, stream);
  if (link.ok()) return *link;
  PINION_LOG(kWarning) << engine_->device().name()
                       << " is taken for a PCIe 4 device, since its link "
                       << "cannot be measured now: " << link.status();
  return AssumedLink();
}

absl::Status DeviceTier::PutOut(absl::Span<Departure> departures) {
  CopyBatch batch(CopyDirection::kDeviceToHost);
  for (const Departure& departure : departures) {
    const std::shared_ptr<HostBuffer> buffer = departure.parcel->ToWrite();
    for (const DeparturePiece& piece : departure.pieces) {
      batch.Add(buffer, piece.offset_bytes, piece.data, piece.size_bytes);
    }
  }
  // Not retried: the bytes are on the device and may stay resident.
  const absl::StatusOr<Transfer> copy = engine_->Submit(batch, departures.front().parcel->stream);
  const bool leak = !copy.ok() && IsPoisoned();
  for (Departure& departure : departures) {
    if (copy.ok()) departure.parcel->Leave(*copy, std::move(departure.memory));
    if (!leak) continue;
    for (DeviceMemory& memory : departure.memory) memory.Leak();
  }
  return copy.status();
}

absl::StatusOr<Transfer> DeviceTier::Fetch(absl::Span<Arrival> arrivals, StreamHandle stream,
                                           GuardedMemories& unneeded) {
  CopyBatch batch(CopyDirection::kHostToDevice);
  for (const Arrival& arrival : arrivals) {
    PINION_ASSIGN_OR_RETURN(std::shared_ptr<HostBuffer> buffer, arrival.claim.parcel().ToRead());
    batch.Add(std::move(buffer), 0, arrival.memory.data(), arrival.claim.parcel().size_bytes);
  }
  absl::StatusOr<Transfer> copy = engine_->Submit(batch, stream);
  const bool leak = !copy.ok() && IsPoisoned();
  for (Arrival& arrival : arrivals) {
    if (leak) arrival.memory.Leak();
    if (!copy.ok()) continue;
    GuardedMemory left = arrival.claim.EndFetch(
        GuardedMemory(std::move(arrival.memory), stream, *copy, kFreeAfterCopy));
    if (left) unneeded.push_back(std::move(left));
  }
  return copy;
}

}  // namespace pinion
