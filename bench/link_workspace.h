// Memory of one device's bandwidth measurements, with verified samples.
//
// Copies of a sample have separate places if memory allows. Before a size is measured its
// destinations are filled with bytes that the sources lack. They are compared with the sources
// afterwards, so a wrong or missing copy is an error.
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
  std::string name;  // "pinned", "pageable"
  std::shared_ptr<HostMemorySource> source;
  bool pinned = true;
  int numa_node = -1;   // node that allocates the memory; -1: any
  bool remote = false;  // the device is on another node
};

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
                                                               const MemoryKind& near);
  ~LinkWorkspace();
  LinkWorkspace(const LinkWorkspace&) = delete;
  LinkWorkspace& operator=(const LinkWorkspace&) = delete;

  Device& device() { return *device_; }
  LinkMeter& meter() { return *meter_; }
  // Returns two places that overlap no measured memory, for keeping the link busy.
  LinkBuffer traffic(CopyDirection direction) const;

  // Switches measurements to `kind` and frees the previous memory. ResourceExhausted if the host or
  // the device lacks `size_bytes`.
  absl::Status Use(const MemoryKind& kind, uint64_t size_bytes);
  uint64_t size_bytes() const { return measured_.size_bytes; }
  int numa_node() const { return host_.numa_node; }  // the memory's; -1: unknown

  // Measures samples, gated for pinned memory. DataLoss describes wrong bytes.
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

  // Near memory: the gate, which also stages verification, and two kinds of traffic.
  HostSegment near_host_;
  void* near_device_ = nullptr;

  MemoryKind kind_;
  HostSegment host_;
  LinkBuffer measured_;
  // The part of the source that has its pattern, for the last measured direction.
  std::optional<CopyDirection> source_of_;
  uint64_t source_bytes_ = 0;
};

}  // namespace pinion

#endif  // PINION_BENCH_LINK_WORKSPACE_H_
