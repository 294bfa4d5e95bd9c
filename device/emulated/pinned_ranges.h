// The host memory that is pinned for a machine's devices: its own segments, and what others own and
// have registered.
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

  // Whose memory it is: a segment of the machine's sources, or what a program has registered.
  enum class Owner { kMachine, kProgram };

  void Add(void* data, uint64_t size_bytes, Owner owner = Owner::kMachine);
  // Waits for all devices, but orders nothing: who relies on it has a race. Unavailable if a stream
  // is stuck; the range then stays.
  absl::Status Remove(void* data);

  // The size of the range of that owner which begins at `data`; 0 if none does.
  uint64_t SizeAt(const void* data, Owner owner = Owner::kMachine) const;
  // How [data, data + size_bytes) lies to the ranges: inside of one, across an end, or apart.
  enum class Overlap { kInside, kPartly, kNone };
  Overlap Find(const void* data, uint64_t size_bytes) const;

 private:
  Simulation* const simulation_;
  struct Range {
    uint64_t size_bytes;
    Owner owner;
  };
  std::map<uintptr_t, Range> ranges_;  // by address
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_PINNED_RANGES_H_
