// Tracks the segments of host memory that are pinned for a machine's devices.
//
// Thread safety: none; the machine's mutex guards it.

#ifndef PINION_DEVICE_EMULATED_PINNED_RANGES_H_
#define PINION_DEVICE_EMULATED_PINNED_RANGES_H_

#include <cstdint>
#include <map>

#include "absl/status/status.h"
#include "pinion/device/emulated/simulation.h"

namespace pinion {

class PinnedRanges {
 public:
  explicit PinnedRanges(Simulation* simulation) : simulation_(simulation) {}

  void Add(void* data, uint64_t size_bytes);
  // Unpins the range at `data` after waiting for all devices. The wait orders nothing: relying on
  // it is a race. Unavailable if a stream is stuck; the range then stays.
  absl::Status Remove(void* data);

  // Returns the size of the range that begins at `data`, or 0.
  uint64_t SizeAt(const void* data) const;
  // Position of [data, data + size_bytes): inside one range, across a border, or outside.
  enum class Overlap { kInside, kPartly, kNone };
  Overlap Find(const void* data, uint64_t size_bytes) const;

 private:
  Simulation* const simulation_;
  std::map<uintptr_t, uint64_t> ranges_;  // sizes in bytes, by address
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_PINNED_RANGES_H_
