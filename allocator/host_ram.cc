#include "pinion/allocator/host_ram.h"

#include <utility>

namespace pinion {

HostRam::HostRam() = default;

HostRam::HostRam(RamProbe probe, std::shared_ptr<HostLedger> ledger)
    : probe(std::move(probe)), ledger(std::move(ledger)) {}

}  // namespace pinion
