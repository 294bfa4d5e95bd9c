// Two emulated devices and a session, for tests of graphs that are kept, dropped or interrupted.

#ifndef PINION_TESTS_HOOKS_ACTIVATIONS_GRAPHS_FIXTURE_H_
#define PINION_TESTS_HOOKS_ACTIVATIONS_GRAPHS_FIXTURE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {

// One layer without dropout, so that every step has the same gradients.
inline NetShape SeededNet(uint64_t seed) {
  NetShape shape;
  shape.layers = 1;
  shape.dropout = 0;
  shape.seed = seed;
  return shape;
}

class GraphsFixture : public OffloadFixture {
 protected:
  GraphsFixture() : OffloadFixture(SmallWindows(), TwoDevices()) {}

  // For every test: autograd starts its workers once, one per device that exists then.
  static EmulatedOptions TwoDevices() {
    EmulatedOptions options = MachineOptions();
    options.device_count = 2;
    return options;
  }

  at::Tensor Forward(const TestNet& net) {
    return InScope(world_.session(), [&] { return net.Loss(); });
  }
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_ACTIVATIONS_GRAPHS_FIXTURE_H_
