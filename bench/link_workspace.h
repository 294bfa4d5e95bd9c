// Memory of one device's bandwidth measurements, with verified samples.
//
// Copies of a sample have separate places if memory allows. Before a size is measured its
// destinations are filled with bytes that the sources lack. They are compared with the sources
// afterwards, so a wrong or missing copy is an error.
//
// Thread safety: one thread at a time.

#ifndef PINION_BENCH_LINK_WORKSPACE_H_
#define PINION_BENCH_LINK_WORKSPACE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/sources/numa.h"
#include "pinion/bench/bandwidth_cases.h"
#include "pinion/bench/test_pattern.h"
#include "pinion/device/device.h"
#include "pinion/engine/link/link_meter.h"

namespace pinion {

// The samples of one size.
struct SamplePlan {
  int samples = 10;
  int copies = 1;  // per sample, timed together
};

// Microseconds per copy, one value per sample.
using SampleTimes = std::vector<double>;

class LinkWorkspace {
 public:
  // `near` is pinned memory near the device, for the gate and for traffic.
  static absl::StatusOr<std::unique_ptr<LinkWorkspace>> Create(std::shared_ptr<Device> device,
                                                               const MemoryKind& near) {
    std::unique_ptr<LinkWorkspace> workspace(new LinkWorkspace(std::move(device), near));
    PINION_RETURN_IF_ERROR(workspace->Init());
    return workspace;
  }
  ~LinkWorkspace() {
    if (meter_ == nullptr) return;
    const absl::Status given_back = [this] {
      PINION_RETURN_IF_ERROR(GiveBack());
      if (near_device_ != nullptr) {
        PINION_RETURN_IF_ERROR(device_->Free(near_device_, meter_->stream()));
      }
      return near_host_.data == nullptr ? absl::OkStatus() : near_.source->Free(near_host_);
    }();
    if (!given_back.ok()) {
      PINION_LOG(kWarning) << "bandwidth: memory of " << device_->name()
                           << " leaks: " << given_back.message();
    }
  }
  LinkWorkspace(const LinkWorkspace&) = delete;
  LinkWorkspace& operator=(const LinkWorkspace&) = delete;

  Device& device() { return *device_; }
  LinkMeter& meter() { return *meter_; }
  // Returns two places that overlap no measured memory, for keeping the link busy.
  LinkBuffer traffic(CopyDirection direction) const {
    return LinkBuffer{near_host_.data, near_device_, kNearBytes}.Part(
        direction == CopyDirection::kHostToDevice ? kNearPartBytes : 2 * kNearPartBytes,
        kNearPartBytes);
  }

  // Switches measurements to `kind` and frees the previous memory. ResourceExhausted if the host or
  // the device lacks `size_bytes`.
  absl::Status Use(const MemoryKind& kind, uint64_t size_bytes) {
    PINION_RETURN_IF_ERROR(GiveBack());
    kind_ = kind;
    PINION_ASSIGN_OR_RETURN(host_, AllocateHost(kind, size_bytes));
    absl::StatusOr<void*> on_device = device_->Allocate(size_bytes, meter_->stream());
    if (!on_device.ok()) {
      PINION_RETURN_IF_ERROR(GiveBack());
      return on_device.status();
    }
    measured_ = {host_.data, *on_device, size_bytes};
    return absl::OkStatus();
  }
  uint64_t size_bytes() const { return measured_.size_bytes; }
  int numa_node() const { return host_.numa_node; }  // the memory's; -1: unknown

  // Measures samples, gated for pinned memory. DataLoss describes wrong bytes.
  absl::StatusOr<SampleTimes> Measure(CopyDirection direction, uint64_t size_bytes,
                                      const SamplePlan& plan) {
    PINION_CHECK(size_bytes > 0 && size_bytes <= measured_.size_bytes)
        << size_bytes << " of " << measured_.size_bytes;
    const uint64_t wanted_places = static_cast<uint64_t>(plan.samples) * plan.copies;
    const uint64_t places = std::min(wanted_places, measured_.size_bytes / size_bytes);
    PINION_RETURN_IF_ERROR(Prepare(direction, places * size_bytes));
    SampleTimes times;
    uint64_t place = 0;
    for (int sample = 0; sample < plan.samples; ++sample) {
      LinkLoad load;
      load.direction = direction;
      for (int i = 0; i < plan.copies; ++i, place = (place + 1) % places) {
        load.pieces.push_back(measured_.Part(place * size_bytes, size_bytes).Piece(direction));
      }
      PINION_ASSIGN_OR_RETURN(
          const double us, kind_.pinned ? meter_->MeasureUs(load) : meter_->MeasureUngatedUs(load));
      times.push_back(us);
    }
    PINION_RETURN_IF_ERROR(Verify(direction, places * size_bytes));
    return times;
  }

 private:
  // Covers the submission of a sample with few copies on the fastest link.
  static constexpr uint64_t kNearPartBytes = 8 * kMiB;
  static constexpr uint64_t kNearBytes = 3 * kNearPartBytes;

  LinkWorkspace(std::shared_ptr<Device> device, const MemoryKind& near)
      : device_(std::move(device)), near_(near) {}

  static absl::StatusOr<HostSegment> AllocateHost(const MemoryKind& kind, uint64_t size_bytes) {
    // The first touch, here or in the driver, allocates pages on the calling thread's node.
    ScopedNumaThread near(kind.numa_node);
    return kind.source->Allocate(AlignUp(size_bytes, kind.source->granularity_bytes()));
  }

  absl::Status Init() {
    PINION_ASSIGN_OR_RETURN(meter_, LinkMeter::Create(*device_));
    PINION_ASSIGN_OR_RETURN(near_host_, AllocateHost(near_, kNearBytes));
    PINION_ASSIGN_OR_RETURN(near_device_, device_->Allocate(kNearBytes, meter_->stream()));
    // Afterwards streams of every device may use the memory.
    PINION_RETURN_IF_ERROR(device_->SynchronizeStream(meter_->stream()));
    meter_->SetGate(LinkBuffer{near_host_.data, near_device_, kNearBytes}.Part(0, kNearPartBytes));
    return absl::OkStatus();
  }

  absl::Status GiveBack() {
    PINION_RETURN_IF_ERROR(meter_->Settle());
    if (void* const data = std::exchange(measured_, {}).device; data != nullptr) {
      PINION_RETURN_IF_ERROR(device_->Free(data, meter_->stream()));
    }
    const HostSegment host = std::exchange(host_, {});
    return host.data == nullptr ? absl::OkStatus() : kind_.source->Free(host);
  }

  // Writes the sent bytes to the source and others to the destination.
  absl::Status Prepare(CopyDirection direction, uint64_t size_bytes) {
    const bool out = direction == CopyDirection::kDeviceToHost;
    (out ? sent_ : stale_).Fill(measured_.host, 0, size_bytes);
    PINION_RETURN_IF_ERROR(CopyNow(CopyDirection::kHostToDevice, size_bytes));
    (out ? stale_ : sent_).Fill(measured_.host, 0, size_bytes);
    return absl::OkStatus();
  }

  absl::Status Verify(CopyDirection direction, uint64_t size_bytes) {
    if (direction == CopyDirection::kHostToDevice) {
      stale_.Fill(measured_.host, 0, size_bytes);
      PINION_RETURN_IF_ERROR(CopyNow(CopyDirection::kDeviceToHost, size_bytes));
    }
    const std::optional<uint64_t> wrong = sent_.FirstDifference(measured_.host, 0, size_bytes);
    if (!wrong.has_value()) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(
        device_->name(), " ", CopyDirectionName(direction), ": byte ", *wrong, " of ",
        HumanBytes(size_bytes),
        " did not arrive as it was sent: a copy changed it, missed its place or never happened"));
  }

  absl::Status CopyNow(CopyDirection direction, uint64_t size_bytes) {
    const CopyPiece piece = measured_.Part(0, size_bytes).Piece(direction);
    PINION_RETURN_IF_ERROR(device_->CopyAsync(direction, {&piece, 1}, meter_->stream()));
    return meter_->Settle();
  }

  const std::shared_ptr<Device> device_;
  const MemoryKind near_;
  const TestPattern sent_{0xBAADF00D};
  const TestPattern stale_{0xCAFEBABE};
  std::unique_ptr<LinkMeter> meter_;

  // Near memory: the gate, and two kinds of traffic.
  HostSegment near_host_;
  void* near_device_ = nullptr;

  MemoryKind kind_;
  HostSegment host_;
  LinkBuffer measured_;
};

}  // namespace pinion

#endif  // PINION_BENCH_LINK_WORKSPACE_H_
