// A calibration must predict the time of loads that it did not measure.

#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/link/calibrate_link.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/link/link_meter.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace link_prediction_test {

constexpr double kOnePercent = 0.01;
constexpr uint64_t kGateBytes = 16 * kMiB;
constexpr uint64_t kLoadBytes = 16 * kMiB;
constexpr uint64_t kTrafficBytes = 16 * kMiB;
constexpr uint64_t kAllBytes = kGateBytes + kLoadBytes + kTrafficBytes;
constexpr CopyDirection kDirections[] = {CopyDirection::kHostToDevice,
                                         CopyDirection::kDeviceToHost};

class LinkPredictionTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    EmulatedOptions options;
    options.memory_bytes = 128 * kMiB;
    options.preset = FindPreset(GetParam()).value();
    machine_ = EmulatedMachine::Create(options).value();
    device_ = machine_->device(0);
    source_ = device_->pinned_source();
    meter_ = LinkMeter::Create(*device_).value();
    host_ = source_->Allocate(kAllBytes).value();
    all_ = {host_.data, device_->Allocate(kAllBytes, meter_->stream()).value(), kAllBytes};
    ASSERT_THAT(meter_->Settle(), testing::IsOk());
    meter_->SetGate(all_.Part(0, kGateBytes));
    const std::shared_ptr<PinnedAllocator> allocator =
        PinnedAllocator::Create({}, source_, testing::FakeHost().Probe()).value();
    link_ = CalibrateLink(*device_, *allocator).value();
  }

  void TearDown() override {
    ASSERT_THAT(meter_->Settle(), testing::IsOk());
    ASSERT_THAT(device_->Free(all_.device, meter_->stream()), testing::IsOk());
    ASSERT_THAT(source_->Free(host_), testing::IsOk());
  }

  // Returns copies of these sizes, adjacent in memory and submitted in sequence.
  LinkLoad Load(CopyDirection direction, const std::vector<uint64_t>& sizes,
                int pieces_per_copy = 1) const {
    LinkLoad load;
    load.direction = direction;
    load.pieces_per_copy = pieces_per_copy;
    uint64_t offset = kGateBytes;
    for (const uint64_t size_bytes : sizes) {
      load.pieces.push_back(all_.Part(offset, size_bytes).Piece(direction));
      offset += size_bytes;
    }
    EXPECT_LE(offset, kGateBytes + kLoadBytes);
    return load;
  }

  void ExpectUs(const LinkLoad& load, double predicted_us, const std::string& what) {
    const absl::StatusOr<double> us = meter_->MeasureUs(load);
    ASSERT_THAT(us, testing::IsOk());
    EXPECT_NEAR(*us, predicted_us, kOnePercent * predicted_us)
        << what << ", " << CopyDirectionName(load.direction);
  }

  std::shared_ptr<EmulatedMachine> machine_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<HostMemorySource> source_;
  std::unique_ptr<LinkMeter> meter_;
  HostSegment host_;
  LinkBuffer all_;
  LinkCalibration link_;
};

TEST_P(LinkPredictionTest, HoldsForMixedSizes) {
  std::mt19937_64 random(3);
  std::vector<uint64_t> sizes;
  uint64_t left = kLoadBytes;
  while (sizes.size() < 24) {
    sizes.push_back(std::uniform_int_distribution<uint64_t>(1, left / 4)(random));
    left -= sizes.back();
  }
  for (const CopyDirection direction : kDirections) {
    double us = 0;
    for (const uint64_t size_bytes : sizes) us += CurveOf(link_, direction).CopyUs(size_bytes);
    ExpectUs(Load(direction, sizes), us / static_cast<double>(sizes.size()), "seed 3");
  }
}

TEST_P(LinkPredictionTest, HoldsForChunksOfALargeCopy) {
  for (const uint64_t chunk_bytes : {64 * kKiB, kMiB, 8 * kMiB}) {
    const std::vector<uint64_t> sizes(8 * kMiB / chunk_bytes, chunk_bytes);
    for (const CopyDirection direction : kDirections) {
      ExpectUs(Load(direction, sizes), CurveOf(link_, direction).CopyUs(chunk_bytes),
               HumanBytes(chunk_bytes));
    }
  }
}

TEST_P(LinkPredictionTest, HoldsForBatchesOfManyPieces) {
  constexpr int kPieces = 100;
  const std::vector<uint64_t> sizes(kPieces, 24 * kKiB);
  for (const CopyDirection direction : kDirections) {
    const LinkCurve& curve = CurveOf(link_, direction);
    ExpectUs(Load(direction, sizes, kPieces),
             curve.CopyUs(kPieces * 24 * kKiB) + (kPieces - 1) * curve.piece_us, "a batch");
  }
}

TEST_P(LinkPredictionTest, HoldsForMixedSizesBesideTheOtherDirection) {
  const std::vector<uint64_t> sizes = {4 * kMiB, 100 * kKiB, 2 * kMiB, 8 * kKiB, 5 * kMiB};
  const uint64_t total = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  for (const CopyDirection direction : kDirections) {
    const CopyDirection other = direction == CopyDirection::kHostToDevice
                                    ? CopyDirection::kDeviceToHost
                                    : CopyDirection::kHostToDevice;
    ASSERT_THAT(
        meter_->AddTraffic(*device_, other, all_.Part(kGateBytes + kLoadBytes, kTrafficBytes)),
        testing::IsOk());
    const double count = static_cast<double>(sizes.size());
    const double us = count * CurveOf(link_, direction).fixed_us +
                      static_cast<double>(total) / (DuplexGbPerSOf(link_, direction) * 1e3);
    ExpectUs(Load(direction, sizes), us / count, "duplex");
    ASSERT_THAT(meter_->ClearTraffic(), testing::IsOk());
  }
}

INSTANTIATE_TEST_SUITE_P(Presets, LinkPredictionTest, ::testing::ValuesIn(PresetNames()),
                         [](const auto& info) { return info.param; });

}  // namespace link_prediction_test
}  // namespace pinion
