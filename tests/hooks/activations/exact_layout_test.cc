// Checks that user code (custom functions, recomputed segments) gets saved tensors with their
// original offset in a storage of the original size.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
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
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Function = std::function<Tensor(const Tensor&)>;

// A custom function that saves `saved` and passes it to `read`, which outlives the graph.
struct Reader : torch::autograd::Function<Reader> {
  using Read = std::function<void(const Tensor&)>;

  static Tensor forward(AutogradContext* context, const Tensor& carrier, const Tensor& saved,
                        const Read* read) {
    context->save_for_backward({saved});
    context->saved_data["read"] = reinterpret_cast<int64_t>(read);
    return carrier.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto* const read = reinterpret_cast<const Read*>(context->saved_data["read"].toInt());
    (*read)(context->get_saved_variables()[0]);
    return {gradients[0], Tensor(), Tensor()};
  }
};

OffloadOptions OptionsOf(const std::string& mode) {
  // Large enough that small tensors are offloaded in groups.
  OffloadOptions options = mode == "Target" ? WithTarget(1) : SmallWindows(64 * kKiB);
  options.min_offload_bytes = 1;
  options.overlap = mode != "Blocking";
  options.verify = mode == "Verified";
  return options;
}

class ExactLayout : public ::testing::TestWithParam<std::string> {
 protected:
  // Compares with the tensor that a program without offload would see on the CPU.
  static void ExpectSame(const Tensor& seen, const Tensor& expected) {
    EXPECT_EQ(seen.sizes(), expected.sizes());
    EXPECT_EQ(seen.strides(), expected.strides());
    EXPECT_EQ(seen.storage_offset(), expected.storage_offset());
    EXPECT_EQ(seen.storage().nbytes(), expected.storage().nbytes());
    EXPECT_TRUE(SameBytes(seen.cpu(), expected));
    EXPECT_TRUE(SameBytes(All(seen).cpu(), All(expected)));
  }
  // Returns a view of the tensor's whole storage.
  static Tensor All(const Tensor& tensor) {
    const auto items = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
    return tensor.detach().as_strided({items}, {1}, 0);
  }

  // Returns the carrier's gradient through small segments whose inputs are offloaded in groups.
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
    world_.session()->FreeDeviceMemory(0);
    Tensor gradient;
    for (const bool again : {true, false}) {
      gradient = torch::autograd::grad({y}, {world_.carrier}, {}, /*retain_graph=*/again)[0].cpu();
    }
    return gradient;
  }

  // The test's premise.
  void ExpectGroups() {
    if (GetParam() == "Windows" || GetParam() == "Verified") {
      EXPECT_GT(world_.stats().groups, 0u);
    }
  }

  OffloadWorld world_{OptionsOf(GetParam())};
};

INSTANTIATE_TEST_SUITE_P(Modes, ExactLayout,
                         ::testing::Values("Windows", "Blocking", "Verified", "Target"),
                         [](const auto& info) { return info.param; });

TEST_P(ExactLayout, ACustomFunctionSeesSizesStridesOffsetAndStorageThatWereSaved) {
  const std::vector<Function> views = {
      [](const Tensor& t) { return t; },
      [](const Tensor& t) { return t.transpose(0, 1); },
      [](const Tensor& t) { return t.slice(0, 5); },
      [](const Tensor& t) { return t.slice(1, 3, 19, 2); },
      [](const Tensor& t) {
        return t.as_strided({16, 30}, {25, 1}, 70);
      },
      [](const Tensor& t) {
        return t.flatten().slice(0, 100, 500).view({20, 20}).t();
      },
  };
  std::vector<Tensor> seen;
  const Reader::Read read = [&seen](const Tensor& tensor) { seen.push_back(tensor); };
  Tensor y = world_.carrier;
  {
    const OffloadScope scope(world_.session());
    for (size_t i = 0; i < views.size(); ++i) {
      const Tensor base = Activation(world_.carrier, {24, 25}, static_cast<int>(i));
      y = Reader::apply(y, views[i](base), &read);
    }
  }
  world_.session()->FreeDeviceMemory(0);
  y.backward();
  EXPECT_GT(world_.stats().fetched_bytes, 0u);
  EXPECT_EQ(world_.stats().reused_on_device, 0u);
  ExpectGroups();
  ASSERT_EQ(seen.size(), views.size());
  for (size_t i = 0; i < views.size(); ++i) {
    SCOPED_TRACE(i);
    const Tensor base = ActivationValues({24, 25}, static_cast<int>(i));
    ExpectSame(seen[views.size() - 1 - i], views[i](base));
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
  ExpectGroups();
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
  // Returns what `read` makes, in a custom function, of a view of a third of its storage.
  Tensor Read(const Function& read) {
    Tensor left;
    const Reader::Read reads = [&](const Tensor& saved) { left = read(saved).cpu(); };
    Tensor y = world_.carrier;
    {
      const OffloadScope scope(world_.session());
      for (int i = 0; i < 4; ++i) {
        y = Reader::apply(y, View(Activation(world_.carrier, {30, 40}, i)), &reads);
      }
    }
    world_.session()->FreeDeviceMemory(0);
    y.backward();
    return left;
  }
  // The result for the tensor saved first, which is read last.
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
