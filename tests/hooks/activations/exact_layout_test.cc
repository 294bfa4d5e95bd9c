// Code that is not LibTorch's own gets saved tensors at their place in a storage like the one that
// was saved: custom nodes, and segments that are computed again.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/checkpoint/checkpoint.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace exact_layout_test {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using at::Tensor;
using Function = std::function<Tensor(const Tensor&)>;

OffloadOptions OptionsOf(const std::string& mode) {
  OffloadOptions options = mode == "Target" ? WithTarget(1) : SmallWindows(1);
  options.min_offload_bytes = 1;
  options.overlap = mode != "Blocking";
  options.verify = mode == "Verified";
  return options;
}

class ExactLayout : public ::testing::TestWithParam<std::string> {
 protected:
  // As a program without offload would see it on the CPU.
  static void ExpectSame(const Tensor& seen, const Tensor& expected) {
    EXPECT_EQ(seen.sizes(), expected.sizes());
    EXPECT_EQ(seen.strides(), expected.strides());
    EXPECT_EQ(seen.storage_offset(), expected.storage_offset());
    EXPECT_EQ(seen.storage().nbytes(), expected.storage().nbytes());
    EXPECT_TRUE(SameBytes(seen.cpu(), expected));
    EXPECT_TRUE(SameBytes(All(seen).cpu(), All(expected)));
  }
  // Its whole storage.
  static Tensor All(const Tensor& tensor) {
    const auto items = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
    return tensor.detach().as_strided({items}, {1}, 0);
  }

  // The gradient of the carrier behind some small segments, whose inputs travel together.
  Tensor GradientOf(const Function& segment, bool offload, const CheckpointOptions& options = {}) {
    SeedGenerators();
    Tensor y;
    {
      std::optional<OffloadScope> scope;
      if (offload) scope.emplace(world_.session());
      y = world_.carrier * at::ones({40, 30}, world_.carrier.options());
      for (int i = 0; i < 6; ++i) {
        y = y * (at::rand({40, 30}).to(world_.device()) + 0.5);
        y = offload ? checkpoint(options, segment, y) : segment(y);
      }
      y = y.sum();
    }
    Tensor gradient;
    for (const bool again : {true, false}) {
      gradient = torch::autograd::grad({y}, {world_.carrier}, {}, /*retain_graph=*/again)[0].cpu();
    }
    return gradient;
  }

  OffloadWorld world_{OptionsOf(GetParam())};
};

INSTANTIATE_TEST_SUITE_P(Modes, ExactLayout,
                         ::testing::Values("Windows", "Blocking", "Verified", "Target"),
                         [](const auto& info) { return info.param; });

TEST_P(ExactLayout, ACustomNodeSeesSizesStridesOffsetAndStorageThatWereSaved) {
  const std::vector<Function> views = {
      [](const Tensor& t) { return t; },
      [](const Tensor& t) { return t.transpose(0, 1); },
      [](const Tensor& t) { return t.slice(0, 5); },
      [](const Tensor& t) { return t.slice(1, 3, 19, 2); },
      [](const Tensor& t) {
        return t.as_strided({10, 30}, {25, 1}, 70);
      },
      [](const Tensor& t) {
        return t.flatten().slice(0, 100, 500).view({20, 20}).t();
      },
  };
  std::vector<std::vector<Tensor>> seen(views.size());
  Tensor y = world_.carrier;
  {
    const OffloadScope scope(world_.session());
    for (size_t i = 0; i < views.size(); ++i) {
      y = Observe(y, {views[i](Activation(world_.carrier, {24, 25}, static_cast<int>(i)))},
                  &seen[i]);
    }
  }
  world_.session()->FreeDeviceMemory(0);
  y.backward();
  EXPECT_GT(world_.stats().fetched_bytes, 0u);
  EXPECT_EQ(world_.stats().reused_on_device, 0u);
  if (GetParam() != "Blocking") {
    EXPECT_GT(world_.stats().groups, 0u);
  }
  for (size_t i = 0; i < views.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectSame(seen[i].at(0), views[i](ActivationValues({24, 25}, static_cast<int>(i))));
  }
}

TEST_P(ExactLayout, AnInputOfASegmentIsReadByOffsetsInItsStorage) {
  const auto segment = [](const Tensor& x) {
    return x + at::tanh(x.as_strided({30}, {1}, 0)) * x.as_strided({30}, {2}, 600).sin();
  };
  const Tensor expected = GradientOf(segment, /*offload=*/false);
  for (int step = 0; step < 3; ++step) {
    EXPECT_TRUE(SameBytes(GradientOf(segment, /*offload=*/true), expected));
    EXPECT_TRUE(SameBytes(GradientOf(segment, /*offload=*/true, {.if_planned = true}), expected));
  }
  EXPECT_GT(world_.stats().fetched_bytes, 0u);
}

TEST_P(ExactLayout, AnInputOfANestedSegmentIsReadByOffsetsInItsStorage) {
  const auto inner = [](const Tensor& x) { return x + at::tanh(x.as_strided({30}, {1}, 0)); };
  const Tensor expected =
      GradientOf([&](const Tensor& x) { return inner(x.sin()); }, /*offload=*/false);
  const auto outer = [&](const Tensor& x) { return checkpoint(inner, x.sin()); };
  EXPECT_TRUE(SameBytes(GradientOf(outer, /*offload=*/true), expected));
}

// --- Views of less than half of their storage, of which nothing else is saved ---

class ExactLayoutOfPart : public ExactLayout {
 protected:
  // What `read` makes, in a custom node, of a view of a third of its storage.
  Tensor Read(const Function& read) {
    Tensor left;
    Tensor y = world_.carrier;
    {
      const OffloadScope scope(world_.session());
      for (int i = 0; i < 4; ++i) {
        y = Probe(y, {View(Activation(world_.carrier, {30, 40}, i))},
                  [&left, read](const Tensor& gradient, const UnpackSaved& unpack) {
                    left = read(unpack()[0]).cpu();
                    return gradient;
                  });
      }
    }
    world_.session()->FreeDeviceMemory(0);
    y.backward();
    return left;
  }
  // Of the first one that was saved, which is read last.
  static Tensor Expected(const Function& read) { return read(View(ActivationValues({30, 40}))); }

  static Tensor View(const Tensor& base) { return base.slice(0, 10, 20); }
};

INSTANTIATE_TEST_SUITE_P(Modes, ExactLayoutOfPart,
                         ::testing::Values("Windows", "Blocking", "Verified", "Target"),
                         [](const auto& info) { return info.param; });

TEST_P(ExactLayoutOfPart, OperatorsAndViewsThatAreRelativeToItReadWhatWasSaved) {
  for (const Function& read : std::initializer_list<Function>{
           [](const Tensor& x) { return x * 2; },
           [](const Tensor& x) { return x.t().slice(0, 3, 30, 4).select(1, 2).sin(); },
           [](const Tensor& x) { return x.flatten().unfold(0, 7, 3); },
           [](const Tensor& x) {
             return x.as_strided({5, 20}, {40, 2}) + 1;
           },
           [](const Tensor& x) { return x.as_strided({5}, {1}, x.storage_offset()); },
           [](const Tensor& x) { return at::matmul(x, x.t()); },
           [](const Tensor& x) { return Tensor(x * 1).as_strided({5}, {1}, 3); },
       }) {
    EXPECT_TRUE(SameBytes(Read(read), Expected(read)));
  }
}

TEST_P(ExactLayoutOfPart, AnOffsetInTheStorageIsAnError) {
  for (const Function& read : std::initializer_list<Function>{
           [](const Tensor& x) { return x.as_strided({5}, {1}, x.storage_offset() + 1); },
           [](const Tensor& x) { return x.t().as_strided({5}, {1}, x.storage_offset() + 1); },
           [](const Tensor& x) { return at::as_strided_copy(x, {5}, {1}, x.storage_offset() + 1); },
       }) {
    EXPECT_THAT([&] { Read(read); },
                ThrowsMessage<c10::Error>(HasSubstr("view of less than half of its storage")));
  }
}

TEST_P(ExactLayoutOfPart, WhatIsBehindItIsAnError) {
  EXPECT_THAT([&] { Read([](const Tensor& x) {
                      return x.as_strided({11, 40}, {40, 1});
                    }); },
              ThrowsMessage<c10::Error>(HasSubstr("out of bounds")));
}

}  // namespace exact_layout_test
}  // namespace pinion::testing
