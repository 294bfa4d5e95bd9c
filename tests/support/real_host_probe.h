// This machine's RAM, for tests about the real host.

#ifndef PINION_TESTS_SUPPORT_REAL_HOST_PROBE_H_
#define PINION_TESTS_SUPPORT_REAL_HOST_PROBE_H_

#include "pinion/allocator/ram/ram_probe.h"

namespace pinion::testing {

// Reads RamProbe()'s files by paths that roomy_host.cc does not replace.
inline RamProbe RealHostProbe() {
  return RamProbe("/proc/.", "/sys/fs/cgroup", "/sys/devices/system/./node/");
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_REAL_HOST_PROBE_H_
