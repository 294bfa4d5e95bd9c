// A device with a session, and what tests of saved tensors need beside it.
//
//   class OffloadRules : public OffloadFixture {};
//
//   TEST_F(OffloadRules, ATensorComesBack) {
//     const at::Tensor y = InScope(world_.session(), [&] {
//       return Observe(carrier_, {activation({64, 64}, 1)}, &seen_);
//     });
//     y.backward();
//     EXPECT_TRUE(SameBytes(seen_[0], ActivationValues({64, 64}, 1)));
//   }

#ifndef PINION_TESTS_HOOKS_ACTIVATIONS_OFFLOAD_FIXTURE_H_
#define PINION_TESTS_HOOKS_ACTIVATIONS_OFFLOAD_FIXTURE_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {

constexpr const char* kInPlaceMessage = "has been modified by an inplace operation";

// Returns what `forward` returns, which runs in a scope of the session, or in none if it is null.
template <typename Forward>
auto InScope(const std::shared_ptr<OffloadSession>& session, const Forward& forward) {
  std::optional<OffloadScope> scope;
  if (session != nullptr) scope.emplace(session);
  return forward();
}

// Returns what `extend`, which runs in a scope, makes of the graph that ends in `y`:
//
//   const at::Tensor loss = InScope(session, carrier, [&](at::Tensor& y) {
//     for (int i = 0; i < 4; ++i) y = Observe(y, {activation(i)}, &seen[i]);
//   });
template <typename Extend>
at::Tensor InScope(const std::shared_ptr<OffloadSession>& session, at::Tensor y,
                   const Extend& extend) {
  return InScope(session, [&] {
    extend(y);
    return y;
  });
}

// Returns a tensor that requires a gradient, for Probe.
inline at::Tensor NewCarrier(const EmuWorld& world) {
  return at::ones({1}, at::TensorOptions(world.device())).requires_grad_(true);
}

// A node that reads its saved tensors, and does nothing with them.
inline at::Tensor Read(const at::Tensor& grad, const UnpackSaved& unpack) {
  unpack();
  return grad;
}

// Returns SmallWindows() of two sizes.
inline OffloadOptions Windows(uint64_t eviction_bytes, uint64_t prefetch_bytes) {
  OffloadOptions options = SmallWindows(eviction_bytes);
  options.prefetch_window_bytes = prefetch_bytes;
  return options;
}

// Returns a machine for tests that write a tensor while its D2H copy reads it. That is formally a
// race. It is harmless because reading the copy raises an error, which these tests check.
inline EmulatedOptions RacesAllowed() {
  EmulatedOptions options = MachineOptions();
  options.detect_races = false;
  return options;
}

// Returns a machine that reports races by races().
inline EmulatedOptions CollectRaces() {
  EmulatedOptions options = MachineOptions();
  options.abort_on_race = false;
  return options;
}

// Takes the gradients, on the CPU. Some may be undefined.
inline std::vector<at::Tensor> TakeGradients(const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& leaf : leaves) {
    at::Tensor& grad = leaf.mutable_grad();
    gradients.push_back(grad.defined() ? grad.cpu() : at::Tensor());
    grad.reset();
  }
  return gradients;
}

// Compares bits.
inline void ExpectSame(const std::vector<at::Tensor>& expected,
                       const std::vector<at::Tensor>& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(SameBytes(expected[i], actual[i])) << i;
}

class OffloadFixture : public ::testing::Test {
 protected:
  // A window of one byte evicts everything at once.
  explicit OffloadFixture(const OffloadOptions& options = SmallWindows(1),
                          const EmulatedOptions& machine = MachineOptions())
      : world_(machine, options) {}

  OffloadStats stats() { return world_.session()->GetStats(); }
  EngineStats engine() { return world_.session()->GetEngineStats(0); }
  uint64_t device_bytes() { return world_.device_bytes(); }
  at::Tensor NewCarrier() { return pinion::testing::NewCarrier(world_); }
  at::Tensor activation(at::IntArrayRef sizes, int first = 0) {
    return Activation(carrier_, sizes, first);
  }

  EmuWorld world_;
  const at::Tensor carrier_ = NewCarrier();
  std::vector<at::Tensor> seen_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_ACTIVATIONS_OFFLOAD_FIXTURE_H_
