// Measures a process's resources between steps, after all submitted work, for tests that nothing
// grows.
//
//   const Footprint before = FootprintOf(world);
//   ... a thousand steps ...
//   EXPECT_EQ(FootprintOf(world).events, before.events);

#ifndef PINION_TESTS_HOOKS_SUPPORT_FOOTPRINT_H_
#define PINION_TESTS_HOOKS_SUPPORT_FOOTPRINT_H_

#include <malloc.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <limits>

#include "pinion/allocator/allocator_stats.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/tests/hooks/support/emu_fixture.h"

namespace pinion::testing {

struct Footprint {
  uint64_t handles = 0;
  uint64_t device_bytes = 0;
  uint64_t pinned_bytes = 0;
  uint64_t host_bytes = 0;  // the part in allocated blocks
  uint64_t threads = 0;
  uint64_t streams = 0;  // streams and events count all ever created; they are reused
  uint64_t events = 0;
  uint64_t heap_bytes = 0;
};

inline Footprint FootprintOf(EmuWorld& world) {
  Footprint footprint;
  footprint.handles = world.QuietStats().live_handles;
  footprint.device_bytes = world.device_bytes();
  const AllocatorStats host = world.session()->GetAllocatorStats();
  footprint.pinned_bytes = host.locked_bytes.current;
  footprint.host_bytes = host.booked_bytes.current;
  using Entries = std::filesystem::directory_iterator;
  footprint.threads = std::distance(Entries("/proc/self/task"), Entries());
  footprint.streams = world.machine().calls(DeviceCall::kCreateStream);
  footprint.events = world.machine().calls(DeviceCall::kCreateEvent);
  const struct mallinfo2 heap = mallinfo2();
  footprint.heap_bytes = heap.uordblks + heap.hblkhd;
  return footprint;
}

// Returns the heap growth in bytes of the quarter of `steps` that grows least. A leak per step
// shows in every quarter; growing tables and glibc's per-thread caches show in one or two.
template <typename Step>
int64_t LeastHeapGrowth(EmuWorld& world, int steps, const Step& step) {
  constexpr int kParts = 4;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int part = 0; part < kParts; ++part) {
    const auto before = static_cast<int64_t>(FootprintOf(world).heap_bytes);
    for (int n = 0; n < steps / kParts; ++n) step();
    least = std::min(least, static_cast<int64_t>(FootprintOf(world).heap_bytes) - before);
  }
  return least;
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_SUPPORT_FOOTPRINT_H_
