// A device with an attribution session, and models whose layers all have the same size.

#ifndef PINION_TESTS_HOOKS_ATTRIBUTION_ATTRIBUTION_FIXTURE_H_
#define PINION_TESTS_HOOKS_ATTRIBUTION_ATTRIBUTION_FIXTURE_H_

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/tap.h"
#include "pinion/hooks/attribution/target.h"
#include "pinion/tests/hooks/support/emu_fixture.h"

namespace pinion::testing {

class AttributionTest : public ::testing::Test {
 protected:
  static constexpr int64_t kSide = 128;
  static constexpr uint64_t kLayerBytes = kSide * kSide * sizeof(float);

  explicit AttributionTest(const EmulatedOptions& machine = MachineOptions(),
                           const OffloadOptions& offload = SmallWindows())
      : world_(machine, offload),
        session_(AttributionSession::Create({offload.allocator, offload.engine}, world_.backend())
                     .value()) {}

  // Returns the same tensor on every device.
  at::Tensor Make(int64_t seed, int device = 0) const {
    const at::Tensor i = at::arange(kSide * kSide, at::kFloat);
    return at::sin(i * 0.37 + static_cast<double>(seed))
        .view({kSide, kSide})
        .to(world_.device(device));
  }

  // Runs layers that save one tensor each, their output, of kLayerBytes.
  at::Tensor Chain(at::Tensor x, int layers, bool taps) const {
    for (int layer = 0; layer < layers; ++layer) {
      x = at::tanh(x);
      if (taps) x = Tap("layer" + std::to_string(layer), x);
    }
    return (x * x).sum(1);
  }

  // Returns the chain of its first input, with taps.
  AttributedForward TappedChain(int layers) const {
    return [this, layers](const std::vector<at::Tensor>& in) {
      return Chain(in[0], layers, /*taps=*/true);
    };
  }
  std::vector<LayerResult> ComputeChain(int layers, const at::Tensor& x) {
    return session_->ComputeLayerGradientsAndEval(TappedChain(layers), LayerNames(layers), {x},
                                                  Target());
  }

  static std::vector<std::string> LayerNames(int layers) {
    std::vector<std::string> names;
    for (int layer = 0; layer < layers; ++layer) names.push_back("layer" + std::to_string(layer));
    return names;
  }

  EmuWorld world_;
  std::shared_ptr<AttributionSession> session_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_ATTRIBUTION_ATTRIBUTION_FIXTURE_H_
