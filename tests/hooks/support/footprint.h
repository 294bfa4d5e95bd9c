// What a process has between two steps, when everything that was submitted is done: for tests that
// nothing grows.
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
  uint64_t host_bytes = 0;  // of them, in blocks that somebody holds
  uint64_t threads = 0;
  uint64_t streams = 0;  // that were ever made, and events: they are used again, not made again
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

// Bytes by which the heap grows in one of four equal parts of `steps` steps, where it grows least.
// What each step forgets is in every part. A table that doubles, and blocks that a thread caches
// (glibc counts them as in use), are in one or two.
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
