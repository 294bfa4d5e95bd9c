// The RAM of this machine, for tests that are about it.

#ifndef PINION_TESTS_SUPPORT_REAL_HOST_PROBE_H_
#define PINION_TESTS_SUPPORT_REAL_HOST_PROBE_H_

#include "pinion/allocator/ram/ram_probe.h"

namespace pinion::testing {

// The files of RamProbe() by paths that roomy_host.cc lets through.
inline RamProbe RealHostProbe() {
  return RamProbe("/proc/.", "/sys/fs/cgroup", "/sys/devices/system/./node/");
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_REAL_HOST_PROBE_H_
