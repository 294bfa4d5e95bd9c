// The RAM that allocators share: where it is read, and the ledger of what is about to be taken.
//
//   PinnedAllocator::Create(options, source);                  // this host
//   PinnedAllocator::Create(options, source, host.Probe());    // a test's fixture
//
// Thread safety: a value.

#ifndef PINION_ALLOCATOR_RAM_HOST_RAM_H_
#define PINION_ALLOCATOR_RAM_HOST_RAM_H_

#include <utility>

#include "pinion/allocator/ram/host_ledger.h"
#include "pinion/allocator/ram/ram_probe.h"

namespace pinion {

struct HostRam {
  // This host, with the ledger of this user.
  HostRam() : ledger(HostLedger::OfThisUser()) {}
  // Implicit, so that a probe can stand for a host that nobody else uses.
  HostRam(RamProbe probe, HostLedger ledger = HostLedger())  // NOLINT
      : probe(std::move(probe)), ledger(std::move(ledger)) {}

  RamProbe probe;
  HostLedger ledger;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_RAM_HOST_RAM_H_
