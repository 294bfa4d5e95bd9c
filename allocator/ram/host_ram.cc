#include "pinion/allocator/ram/host_ram.h"

#include <utility>

#include "pinion/allocator/ram/host_ledger.h"

namespace pinion {

HostRam::HostRam(RamProbe probe, std::shared_ptr<HostLedger> ledger)
    : probe(std::move(probe)),
      ledger(ledger != nullptr ? std::move(ledger) : HostLedger::Private()) {}

}  // namespace pinion
