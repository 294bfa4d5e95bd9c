// This machine's RAM and NUMA nodes, for tests about the real host.

#ifndef PINION_TESTS_SUPPORT_REAL_HOST_PROBE_H_
#define PINION_TESTS_SUPPORT_REAL_HOST_PROBE_H_

#include "pinion/allocator/ram/ram_probe.h"

namespace pinion::testing {

// Is kNumaRoot, by a path that roomy_host.cc does not replace.
inline constexpr char kRealNumaRoot[] = "/sys/devices/system/./node/";

// Reads RamProbe()'s files by such paths.
inline RamProbe RealHostProbe() { return RamProbe("/proc/.", "/sys/fs/cgroup", kRealNumaRoot); }

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_REAL_HOST_PROBE_H_
