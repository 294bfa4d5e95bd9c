// Two emulated devices and a session, for tests of graphs that are kept, dropped or interrupted.

#ifndef PINION_TESTS_HOOKS_ACTIVATIONS_GRAPHS_FIXTURE_H_
#define PINION_TESTS_HOOKS_ACTIVATIONS_GRAPHS_FIXTURE_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <cstdint>

#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
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

class GraphsFixture : public ::testing::Test {
 protected:
  GraphsFixture() : world_(TwoDevices()) {}

  // For every test: autograd starts its workers once, one per device that exists then.
  static EmulatedOptions TwoDevices() {
    EmulatedOptions options = MachineOptions();
    options.device_count = 2;
    return options;
  }

  OffloadStats stats() { return world_.session()->GetStats(); }
  uint64_t device_bytes() { return world_.device_bytes(); }
  at::Tensor NewCarrier() {
    return at::ones({1}, at::TensorOptions(world_.device())).requires_grad_(true);
  }
  at::Tensor Forward(const TestNet& net) {
    const OffloadScope scope(world_.session());
    return net.Loss();
  }

  EmuWorld world_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_ACTIVATIONS_GRAPHS_FIXTURE_H_
