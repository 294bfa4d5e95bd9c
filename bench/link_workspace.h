// The memory of one device's bandwidth measurements, and verified samples taken in it.
//
// Every copy of a sample has a place of its own where memory allows it. Before a size is measured,
// all its destinations are filled with bytes that the sources do not have; afterwards they are
// compared with the sources. So a copy that changed a byte, missed its place or did not happen is
// an error and not a good bandwidth.
//
// Thread safety: one thread at a time.

#ifndef PINION_BENCH_LINK_WORKSPACE_H_
#define PINION_BENCH_LINK_WORKSPACE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/bench/test_pattern.h"
#include "pinion/device/device.h"
#include "pinion/engine/link/link_meter.h"

namespace pinion {

// Host memory of one kind, as the host's end of copies.
struct MemoryKind {
  std::string name;  // "pinned", "pageable", "registered"
  std::shared_ptr<HostMemorySource> source;
  bool pinned = true;
  int numa_node = -1;   // from whose CPUs the memory is asked for; -1: from any
  bool remote = false;  // the device hangs on another node
};

// How one size is measured.
struct SamplePlan {
  int samples = 10;
  int copies = 1;  // per sample, timed together
};

// Microseconds per copy, one value per sample.
using SampleTimes = std::vector<double>;

class LinkWorkspace {
 public:
  // `near` is pinned memory next to the device: gate and traffic lie in it.
  static absl::StatusOr<std::unique_ptr<LinkWorkspace>> Create(std::shared_ptr<Device> device,
                                                               const MemoryKind& near);
  ~LinkWorkspace();
  LinkWorkspace(const LinkWorkspace&) = delete;
  LinkWorkspace& operator=(const LinkWorkspace&) = delete;

  Device& device() { return *device_; }
  LinkMeter& meter() { return *meter_; }
  // Two places that overlap nothing else, to keep the link busy with.
  LinkBuffer traffic(CopyDirection direction) const;

  // Measures with `kind` from now on; what was used before is given back. ResourceExhausted where
  // the host or the device has no `size_bytes` left.
  absl::Status Use(const MemoryKind& kind, uint64_t size_bytes);
  uint64_t size_bytes() const { return measured_.size_bytes; }
  int numa_node() const { return host_.numa_node; }  // where the memory is; -1: unknown

  // Gated for pinned memory. DataLoss where bytes arrived that nobody sent: the message says which.
  absl::StatusOr<SampleTimes> Measure(CopyDirection direction, uint64_t size_bytes,
                                      const SamplePlan& plan);

 private:
  LinkWorkspace(std::shared_ptr<Device> device, const MemoryKind& near)
      : device_(std::move(device)), near_(near) {}

  absl::Status Init();
  absl::Status GiveBack();
  absl::Status FillSource(CopyDirection direction, uint64_t size_bytes);
  absl::Status WriteDevice(const TestPattern& pattern, uint64_t size_bytes);
  absl::Status Verify(CopyDirection direction, uint64_t size_bytes);
  absl::Status CopyPart(CopyDirection direction, uint64_t offset_bytes, uint64_t size_bytes);
  LinkBuffer Stage() const;

  const std::shared_ptr<Device> device_;
  const MemoryKind near_;
  const TestPattern sent_{0xBAADF00D};
  const TestPattern stale_{0xCAFEBABE};
  std::unique_ptr<LinkMeter> meter_;

  // Near memory: the gate, which is also the stage of verification, and two kinds of traffic.
  HostSegment near_host_;
  void* near_device_ = nullptr;

  MemoryKind kind_;
  HostSegment host_;
  LinkBuffer measured_;
  // How much of the source holds what is to be sent, for the direction that was measured last.
  std::optional<CopyDirection> source_of_;
  uint64_t source_bytes_ = 0;
};

}  // namespace pinion

#endif  // PINION_BENCH_LINK_WORKSPACE_H_
