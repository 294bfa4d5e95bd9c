// Checks user-defined saved-tensor hooks, the guard that disables hooks, and nesting with Pinion's
// and Python's hooks: the innermost hooks win.

#include "pinion/hooks/checkpoint/saved_tensors_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/autograd/libtorch_compat.h"
#include "pinion/hooks/checkpoint/checkpoint.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/python_like_hooks.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/captured_log.h"

namespace pinion::testing {
namespace {

using ::testing::HasSubstr;

at::Tensor Leaf() { return at::ones({4}).requires_grad_(true); }

const auto kDetach = [](const at::Tensor& tensor) { return tensor.detach(); };

TEST(SavedTensorsHooksTest, UnpackGetsWhatPackHasReturnedForEachRead) {
  const at::Tensor x = Leaf();
  int packed = 0, unpacked = 0;
  at::Tensor y;
  {
    const SavedTensorsHooks hooks(
        [&packed](const at::Tensor& tensor) {
          ++packed;
          return std::make_unique<at::Tensor>(tensor.detach());
        },
        [&unpacked](const std::unique_ptr<at::Tensor>& kept) {
          ++unpacked;
          return *kept * 2;
        });
    y = at::exp(x);
  }
  EXPECT_EQ(packed, 1);
  EXPECT_EQ(unpacked, 0);
  y.sum().backward({}, /*retain_graph=*/true);
  y.sum().backward();
  EXPECT_EQ(unpacked, 2);
  EXPECT_TRUE(SameBytes(x.grad(), at::exp(x.detach()) * 4));
}

TEST(SavedTensorsHooksTest, HooksNeedNotBeCopyable) {
  const at::Tensor x = Leaf();
  at::Tensor y;
  {
    const SavedTensorsHooks hooks(
        [by = std::make_unique<int>(2)](const at::Tensor& tensor) { return tensor.detach() * *by; },
        [by = std::make_unique<int>(2)](const at::Tensor& kept) { return kept / *by; });
    y = at::exp(x);
  }
  y.sum().backward();
  EXPECT_TRUE(SameBytes(x.grad(), at::exp(x.detach())));
}

TEST(SavedTensorsHooksTest, PackThatReturnsItsTensorDoesNotKeepTheGraph) {
  const at::Tensor x = Leaf();
  at::Tensor y;
  {
    const SavedTensorsHooks hooks([](const at::Tensor& tensor) { return tensor; },
                                  [](const at::Tensor& tensor) { return tensor; });
    y = at::exp(x);
  }
  const NodePtr node = y.grad_fn();
  y.reset();
  EXPECT_EQ(node.use_count(), 1);
}

TEST(SavedTensorsHooksTest, WhatUnpackReturnsIsNoGradientToWriteTo) {
  const at::Tensor x = Leaf();
  const at::Tensor kept = at::ones({4}) * 3;
  at::Tensor y;
  {
    const SavedTensorsHooks hooks(kDetach, [&kept](const at::Tensor&) { return kept.detach(); });
    y = Probe(x, {at::ones({4})},
              [](const at::Tensor&, const UnpackSaved& unpack) { return unpack()[0]; });
  }
  y.sum().backward({}, /*retain_graph=*/true);
  y.sum().backward();
  EXPECT_TRUE(SameBytes(kept, at::ones({4}) * 3));
  EXPECT_TRUE(SameBytes(x.grad(), at::ones({4}) * 6));
}

TEST(SavedTensorsHooksTest, HooksThatDoTheImpossibleAreTold) {
  const at::Tensor x = Leaf();
  {
    const SavedTensorsHooks hooks([](const at::Tensor& tensor) { return tensor.detach().add_(1); },
                                  kDetach);
    EXPECT_THAT(ErrorOf([&] { at::exp(x); }), HasSubstr("modifying its input in place"));
  }
  at::Tensor y;
  {
    const SavedTensorsHooks hooks(kDetach, [](const at::Tensor&) { return at::Tensor(); });
    y = at::exp(x).sum();
  }
  EXPECT_THAT(ErrorOf([&] { y.backward(); }), HasSubstr("returned no tensor"));
  const struct {
    const char* named;
    std::function<at::Tensor(const at::Tensor&)> unpack;
  } rows[] = {
      {"Float [1] for Float [4]", [](const at::Tensor& packed) { return packed[0].view({1}); }},
      {"Float [4, 1] for Float [4]",
       [](const at::Tensor& packed) {
         return packed.view({4, 1});
       }},
      {"Half [4] for Float [4]", [](const at::Tensor& packed) { return packed.to(at::kHalf); }},
  };
  for (const auto& [named, unpack] : rows) {
    {
      const SavedTensorsHooks hooks(kDetach, unpack);
      y = at::exp(x).sum();
    }
    EXPECT_THAT(ErrorOf([&] { y.backward(); }), HasSubstr(named));
  }
}

TEST(DisableSavedTensorsHooksTest, OpeningAnyHooksInsideSaysWhy) {
  EmuWorld world;
  const at::Tensor x = Leaf();
  const auto user = [&] { const SavedTensorsHooks hooks(kDetach, kDetach); };
  const auto segment = [&] { checkpoint([](const at::Tensor& in) { return at::exp(in); }, x); };
  const auto offload = [&] { const OffloadScope scope(world.session()); };
  const auto python = [&] { const PythonHooks hooks; };
  for (const std::function<void()>& open :
       {std::function<void()>(user), {segment}, {offload}, {python}}) {
    EXPECT_EQ(ErrorOf(open), "no error");
    {
      const DisableSavedTensorsHooks outer("the outer reason");
      {
        const DisableSavedTensorsHooks inner("the inner reason");
        EXPECT_THAT(ErrorOf(open), HasSubstr("the inner reason"));
      }
      EXPECT_THAT(ErrorOf(open), HasSubstr("the outer reason"));
      EXPECT_EQ(ErrorOf([] { const NoOffloadScope nothing; }), "no error");
    }
    EXPECT_EQ(ErrorOf(open), "no error");
  }
}

TEST(DisableSavedTensorsHooksTest, ABackwardThatComputesASegmentAgainSaysWhyNot) {
  const at::Tensor x = Leaf();
  const at::Tensor y = checkpoint([](const at::Tensor& in) { return at::exp(in); }, x).sum();
  {
    const DisableSavedTensorsHooks off("no hooks in this backward");
    EXPECT_THAT(ErrorOf([&] { y.backward({}, /*retain_graph=*/true); }),
                HasSubstr("no hooks in this backward"));
  }
  y.backward();
  EXPECT_TRUE(SameBytes(x.grad(), at::exp(x.detach())));
}

TEST(DisableSavedTensorsHooksTest, ThoseThatEndInTheOrderInWhichTheyBeganLeaveHooksEnabled) {
  const auto message = [] {
    return at::SavedTensorDefaultHooks::get_disabled_error_message().value_or("enabled");
  };
  std::optional<DisableSavedTensorsHooks> outer(std::in_place, "the outer reason");
  std::optional<DisableSavedTensorsHooks> inner(std::in_place, "the inner reason");
  {
    const CapturedLog log;
    outer.reset();
    EXPECT_THAT(log.text(), HasSubstr("DisableSavedTensorsHooks has ended out of order"));
  }
  EXPECT_EQ(message(), "the inner reason");
  inner.reset();
  EXPECT_EQ(message(), "enabled");
}

TEST(DisableSavedTensorsHooksTest, OneThatEndsOnAnotherThreadLeavesThatThreadAlone) {
  std::optional<DisableSavedTensorsHooks> off(std::in_place, "a reason");
  std::thread([&off] {
    const DisableSavedTensorsHooks own("another reason");
    const CapturedLog log;
    off.reset();
    EXPECT_THAT(log.text(), HasSubstr("has ended on another thread"));
    EXPECT_FALSE(at::SavedTensorDefaultHooks::is_enabled());
  }).join();
  { const DisableSavedTensorsHooks next("the next reason"); }
  EXPECT_TRUE(at::SavedTensorDefaultHooks::is_enabled());
}

TEST(DisableSavedTensorsHooksTest, ItAgreesWithWhoeverElseDisablesHooks) {
  const auto open = [] { const SavedTensorsHooks hooks(kDetach, kDetach); };
  {
    const DisableSavedTensorsHooks off("ours");
    EXPECT_EQ(at::SavedTensorDefaultHooks::get_disabled_error_message(), "ours");
  }
  EXPECT_TRUE(at::SavedTensorDefaultHooks::is_enabled());
  at::SavedTensorDefaultHooks::disable("theirs");
  EXPECT_THAT(ErrorOf(open), HasSubstr("theirs"));
  { const DisableSavedTensorsHooks off("ours"); }
  EXPECT_EQ(at::SavedTensorDefaultHooks::get_disabled_error_message(), "theirs");
  at::SavedTensorDefaultHooks::enable();
}

TEST(DisableSavedTensorsHooksTest, InsideOfHooksItIsRefused) {
  const auto disable = [] { const DisableSavedTensorsHooks off("too late"); };
  {
    const SavedTensorsHooks hooks(kDetach, kDetach);
    EXPECT_THAT(ErrorOf(disable), HasSubstr("too late"));
  }
  {
    const PythonHooks hooks;
    EXPECT_THAT(ErrorOf(disable), HasSubstr("too late"));
  }
  EXPECT_TRUE(at::SavedTensorDefaultHooks::is_enabled());
}

// --- Nested hooks ---

enum class Who { kPython, kUser, kOffload, kCheckpoint, kNobody };
constexpr Who kAll[] = {Who::kPython, Who::kUser, Who::kOffload, Who::kCheckpoint, Who::kNobody};

class NestedHooks {
 public:
  // Returns exp(x) inside all `kinds`; the first is the outermost.
  at::Tensor Run(const std::vector<Who>& kinds, const at::Tensor& x, size_t next = 0) {
    if (next == kinds.size()) {
      ++ran;
      return at::exp(x);
    }
    switch (kinds[next]) {
      case Who::kPython: {
        const PythonHooks hooks;
        return Run(kinds, x, next + 1);
      }
      case Who::kUser: {
        const SavedTensorsHooks hooks(
            [this](const at::Tensor& tensor) {
              ++packed_by_user;
              return tensor.detach();
            },
            kDetach);
        return Run(kinds, x, next + 1);
      }
      case Who::kOffload: {
        const OffloadScope scope(world.session());
        return Run(kinds, x, next + 1);
      }
      case Who::kCheckpoint:
        return checkpoint(
            [this, kinds, next](const at::Tensor& in) { return Run(kinds, in, next + 1); }, x);
      case Who::kNobody: {
        const NoOffloadScope nobody;
        return Run(kinds, x, next + 1);
      }
    }
    return {};
  }

  // Returns who packs inside the first `count` kinds; NoOffloadScope leaves Python's hooks enabled.
  static Who PackerIn(const std::vector<Who>& kinds, size_t count) {
    const auto end = kinds.begin() + static_cast<std::ptrdiff_t>(count);
    if (end[-1] != Who::kNobody) return end[-1];
    return std::find(kinds.begin(), end, Who::kPython) == end ? Who::kNobody : Who::kPython;
  }
  // Returns how many tensors `who` has packed after Run: exp's output if it is the innermost, and
  // the input of each checkpoint directly inside it.
  static uint64_t Packs(const std::vector<Who>& kinds, Who who) {
    uint64_t packs = PackerIn(kinds, kinds.size()) == who;
    for (size_t i = 1; i < kinds.size(); ++i) {
      packs += PackerIn(kinds, i) == who && kinds[i] == Who::kCheckpoint;
    }
    return packs;
  }

  OffloadWorld world{EverySize(1)};
  PythonLikeEngineScope python;
  uint64_t packed_by_user = 0;
  int ran = 0;
};

std::vector<std::vector<Who>> Combinations(size_t count) {
  std::vector<std::vector<Who>> all = {{}};
  for (size_t i = 0; i < count; ++i) {
    std::vector<std::vector<Who>> longer;
    for (const std::vector<Who>& kinds : all) {
      for (const Who who : kAll) {
        longer.push_back(kinds);
        longer.back().push_back(who);
      }
    }
    all = std::move(longer);
  }
  return all;
}

TEST(NestedHooksTest, TheInnermostHooksWinWhoeverOpenedThem) {
  NestedHooks nested;
  const at::Tensor x = nested.world.activation(32).detach().div(256).requires_grad_(true);
  const at::Tensor expected = at::exp(x.detach());
  for (const size_t count : {1, 2, 3}) {
    for (const std::vector<Who>& kinds : Combinations(count)) {
      std::string order;
      for (const Who who : kinds) absl::StrAppend(&order, static_cast<int>(who), " ");
      SCOPED_TRACE(order);
      const uint64_t user = nested.packed_by_user, python = nested.python.packed();
      const uint64_t offloaded = nested.world.stats().packed;
      const int ran = nested.ran;
      const at::Tensor y = nested.Run(kinds, x);
      EXPECT_EQ(nested.packed_by_user - user, NestedHooks::Packs(kinds, Who::kUser));
      EXPECT_EQ(nested.python.packed() - python, NestedHooks::Packs(kinds, Who::kPython));
      EXPECT_EQ(nested.world.stats().packed - offloaded, NestedHooks::Packs(kinds, Who::kOffload));
      y.sum().backward();
      EXPECT_EQ(nested.ran - ran, kinds.back() == Who::kCheckpoint ? 2 : 1);
      EXPECT_TRUE(SameBytes(x.grad(), expected));
      x.mutable_grad().reset();
    }
  }
}

}  // namespace
}  // namespace pinion::testing
