// Machines and targets for plans that depend on the link's speed alone.

#ifndef PINION_TESTS_HOOKS_CHECKPOINT_MACHINE_WITH_LINK_H_
#define PINION_TESTS_HOOKS_CHECKPOINT_MACHINE_WITH_LINK_H_

#include <cstdint>

#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/tests/hooks/support/emu_fixture.h"

namespace pinion::testing {

// Returns a machine whose calls cost nothing and whose link has `gb_per_s`.
inline EmulatedOptions MachineWithLink(double gb_per_s) {
  EmulatedOptions options = MachineOptions();
  options.preset.host_call_us = 0;
  options.preset.host_event_us = 0;
  options.preset.launch_us = 1;
  options.preset.link.d2h_gb_per_s = options.preset.link.h2d_gb_per_s = gb_per_s;
  options.preset.link.d2h_duplex_gb_per_s = options.preset.link.h2d_duplex_gb_per_s = gb_per_s;
  return options;
}

inline OffloadOptions TargetBesideLink(uint64_t target_bytes, double gb_per_s) {
  OffloadOptions options = WithTarget(target_bytes);
  if (!options.link.has_value()) return options;
  options.link->d2h.gb_per_s = options.link->h2d.gb_per_s = gb_per_s;
  options.link->d2h_duplex_gb_per_s = options.link->h2d_duplex_gb_per_s = gb_per_s;
  return options;
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_CHECKPOINT_MACHINE_WITH_LINK_H_
