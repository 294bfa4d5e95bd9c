#include "pinion/engine/link/calibrate_link.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/keep_for_ever.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/link/link_meter.h"

namespace pinion {
namespace {

constexpr uint64_t kMostBytes = 16 * kMiB;
constexpr uint64_t kLeastBytes = kMiB;

constexpr int kRepeats = 5;
constexpr int kRepeatsOfModelled = 1;  // modelled times do not scatter
constexpr uint64_t kSmallestCopyBytes = 4 * kKiB;
// Enough small copies to hide the events around them, few enough for a short gate. One copy of the
// largest size, which is half of the borrowed memory.
constexpr uint64_t kLoadBytes = kMostBytes / 2;
constexpr uint64_t kMostCopies = 16;
// Beside traffic only the slope matters: measure copies from this part of the largest size on.
constexpr uint64_t kDuplexPart = 16;

// The cost of one more piece is the slope between these two batches.
constexpr int kFewPieces = 4;
constexpr int kManyPieces = 32;
// Apart from each other, so that no driver merges two pieces.
constexpr uint64_t kPieceDistanceBytes = 2 * kSmallestCopyBytes;

// The borrowed memory and the meter that uses it. One half is for the measured copies and their
// gate, the other half for traffic in the opposite direction.
class Workbench {
 public:
  static absl::StatusOr<std::unique_ptr<Workbench>> Create(Device& device,
                                                           PinnedAllocator& allocator) {
    PINION_ASSIGN_OR_RETURN(std::unique_ptr<LinkMeter> meter, LinkMeter::Create(device));
    std::unique_ptr<Workbench> bench(new Workbench(device, std::move(meter)));
    absl::Status borrowed;
    for (uint64_t size_bytes = kMostBytes; size_bytes >= kLeastBytes; size_bytes /= 2) {
      borrowed = bench->Borrow(allocator, size_bytes);
      if (!absl::IsResourceExhausted(borrowed)) break;
    }
    PINION_RETURN_IF_ERROR(borrowed);
    bench->meter_->SetGate(bench->measured());
    return bench;
  }

  ~Workbench() {
    if (on_device_ == nullptr) return;  // nothing was borrowed, so nothing is in flight
    const absl::Status settled = meter_->Settle();
    if (!settled.ok()) {
      PINION_LOG(kError) << "link calibration: " << HumanBytes(host_.size_bytes())
                         << " of pinned memory leak, a copy may still touch them: "
                         << settled.message();
      KeepForEver(std::make_shared<PinnedBlock>(std::move(host_)));
      return;
    }
    const absl::Status freed = device_.Free(on_device_, meter_->stream());
    if (!freed.ok()) PINION_LOG(kError) << "link calibration: " << freed.message();
  }

  LinkMeter& meter() { return *meter_; }
  LinkBuffer measured() const { return All().Part(0, HalfBytes()); }
  LinkBuffer traffic() const { return All().Part(HalfBytes(), HalfBytes()); }

  // Returns the median of several samples of `load`.
  absl::StatusOr<double> MedianUs(const LinkLoad& load) {
    std::vector<double> samples;
    for (int i = 0; i < repeats_; ++i) {
      PINION_ASSIGN_OR_RETURN(const double us, meter_->MeasureUs(load));
      samples.push_back(us);
    }
    std::sort(samples.begin(), samples.end());
    return samples[repeats_ / 2];
  }

  // Returns a curve without piece_us, fitted to copies from `from_bytes` on.
  absl::StatusOr<LinkCurve> MeasureCurve(CopyDirection direction, uint64_t from_bytes) {
    std::vector<CopyTime> times;
    for (uint64_t size_bytes = from_bytes; size_bytes <= measured().size_bytes; size_bytes *= 4) {
      LinkLoad load;
      load.direction = direction;
      load.pieces.assign(std::min(kLoadBytes / size_bytes, kMostCopies),
                         measured().Part(0, size_bytes).Piece(direction));
      PINION_ASSIGN_OR_RETURN(const double us, MedianUs(load));
      times.push_back({size_bytes, us});
    }
    absl::StatusOr<LinkCurve> curve = FitLinkCurve(times);
    if (curve.ok()) return curve;
    // The caller's arguments were valid.
    return absl::FailedPreconditionError(curve.status().message());
  }

  absl::StatusOr<double> MeasurePieceUs(CopyDirection direction, const LinkCurve& curve) {
    PINION_ASSIGN_OR_RETURN(const double few_us, MeasureBatchUs(direction, kFewPieces));
    PINION_ASSIGN_OR_RETURN(const double many_us, MeasureBatchUs(direction, kManyPieces));
    const double slope_us = (many_us - few_us) / (kManyPieces - kFewPieces);
    return std::max(0.0,
                    slope_us - static_cast<double>(kSmallestCopyBytes) / (curve.gb_per_s * 1e3));
  }

 private:
  Workbench(Device& device, std::unique_ptr<LinkMeter> meter)
      : device_(device),
        repeats_(device.info().modelled ? kRepeatsOfModelled : kRepeats),
        meter_(std::move(meter)) {}

  absl::Status Borrow(PinnedAllocator& allocator, uint64_t size_bytes) {
    PINION_ASSIGN_OR_RETURN(PinnedBlock host, allocator.Allocate(size_bytes));
    if (!host.pinned() && allocator.GetStats().pinned)
      return absl::ResourceExhaustedError("no pinned memory is left");
    PINION_ASSIGN_OR_RETURN(on_device_, device_.Allocate(size_bytes, meter_->stream()));
    host_ = std::move(host);
    return absl::OkStatus();
  }

  LinkBuffer All() const { return {host_.data(), on_device_, host_.size_bytes()}; }
  uint64_t HalfBytes() const { return host_.size_bytes() / 2; }

  absl::StatusOr<double> MeasureBatchUs(CopyDirection direction, int pieces) {
    LinkLoad load;
    load.direction = direction;
    load.pieces_per_copy = pieces;
    for (int i = 0; i < pieces; ++i) {
      const uint64_t offset_bytes = kPieceDistanceBytes * static_cast<uint64_t>(i);
      load.pieces.push_back(measured().Part(offset_bytes, kSmallestCopyBytes).Piece(direction));
    }
    return MedianUs(load);
  }

  Device& device_;
  const int repeats_;
  std::unique_ptr<LinkMeter> meter_;
  PinnedBlock host_;
  void* on_device_ = nullptr;
};

constexpr CopyDirection Opposite(CopyDirection direction) {
  return direction == CopyDirection::kHostToDevice ? CopyDirection::kDeviceToHost
                                                   : CopyDirection::kHostToDevice;
}

}  // namespace

absl::StatusOr<LinkCalibration> CalibrateLink(Device& device, PinnedAllocator& allocator) {
  PINION_ASSIGN_OR_RETURN(const std::unique_ptr<Workbench> bench,
                          Workbench::Create(device, allocator));
  LinkCalibration link;
  link.modelled = device.info().modelled;
  for (const CopyDirection direction :
       {CopyDirection::kHostToDevice, CopyDirection::kDeviceToHost}) {
    const bool h2d = direction == CopyDirection::kHostToDevice;
    PINION_ASSIGN_OR_RETURN(LinkCurve curve, bench->MeasureCurve(direction, kSmallestCopyBytes));
    PINION_ASSIGN_OR_RETURN(curve.piece_us, bench->MeasurePieceUs(direction, curve));
    (h2d ? link.h2d : link.d2h) = curve;

    PINION_RETURN_IF_ERROR(
        bench->meter().AddTraffic(device, Opposite(direction), bench->traffic()));
    PINION_ASSIGN_OR_RETURN(
        const LinkCurve duplex,
        bench->MeasureCurve(direction, bench->measured().size_bytes / kDuplexPart));
    PINION_RETURN_IF_ERROR(bench->meter().ClearTraffic());
    (h2d ? link.h2d_duplex_gb_per_s : link.d2h_duplex_gb_per_s) =
        std::min(duplex.gb_per_s, curve.gb_per_s);
  }
  return link;
}

}  // namespace pinion
