// The RAM that allocators share: where it is read, and who else is about to take some of it.
//
//   PinnedAllocator::Create(options, source);                  // this host
//   PinnedAllocator::Create(options, source, host.Probe());    // a test's fixture
//
// Thread safety: a value.

#ifndef PINION_ALLOCATOR_RAM_HOST_RAM_H_
#define PINION_ALLOCATOR_RAM_HOST_RAM_H_

#include <memory>

#include "pinion/allocator/ram/ram_probe.h"

namespace pinion {

class HostLedger;

struct HostRam {
  // This host, and the ledger that all Pinion processes of this user share: HostLedger::OfThisUser,
  // opened by the allocator that is to use it. One that gets another ledger opens none.
  HostRam() = default;
  // Other files, and the ledger of those who look at the same ones; null: nobody else does.
  // Implicit, so that a probe can stand for a host.
  HostRam(RamProbe probe, std::shared_ptr<HostLedger> ledger = nullptr);  // NOLINT

  RamProbe probe;
  std::shared_ptr<HostLedger> ledger;  // null: that of this user
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_RAM_HOST_RAM_H_
