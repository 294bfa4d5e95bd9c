// Checks that weights cast to a lower precision are not copied but recast in backward, to the same
// bytes. Casts that could not be reproduced exactly are offloaded like other tensors.

#include <ATen/TensorOperators.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace offload_cast_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kSide = 128;
constexpr uint64_t kCastBytes = kSide * kSide * 2;  // large enough for a copy of its own

at::Tensor Randn(c10::Device device, at::IntArrayRef sizes, uint64_t seed) {
  at::manual_seed(seed);
  return at::randn(sizes).to(device);
}

class OffloadCast : public OffloadFixture {
 protected:
  using OffloadFixture::OffloadFixture;

  at::Tensor NewWeight(uint64_t seed, at::IntArrayRef sizes = {kSide, kSide}) {
    return Randn(world_.device(), sizes, seed).requires_grad_(true);
  }
  static at::Tensor Cast(const at::Tensor& weight) { return weight.to(at::kBFloat16); }
  static at::Tensor OnHost(const at::Tensor& tensor) { return tensor.detach().cpu(); }

  // Runs a scope that sees the weight cast, so that the next scope recognises the cast.
  void Learn(const at::Tensor& weight) {
    const OffloadScope scope(world_.session());
    Observe(carrier_, {Cast(weight)}, &seen_).backward();
    seen_.clear();
  }
  at::Tensor LearnedWeight() {
    at::Tensor weight = NewWeight(1);
    Learn(weight);
    return weight;
  }
  // Changes the weight like an optimizer.
  static void Step(const at::Tensor& weight) {
    const c10::NoGradGuard no_grad;
    weight.mul_(1.5);
  }
  // Changes the weight like an optimizer whose fused operator raises no version.
  static void FusedStep(const at::Tensor& weight) {
    const c10::NoGradGuard no_grad;
    const int64_t before = weight._version();
    at::_fused_adamw_({weight}, {at::ones_like(weight)}, {at::zeros_like(weight)},
                      {at::zeros_like(weight)}, {},
                      {at::ones({}, at::TensorOptions(weight.device()))}, 0.1, 0.9, 0.99, 0.1, 1e-8,
                      /*amsgrad=*/false, /*maximize=*/false);
    EXPECT_EQ(weight._version(), before) << "the test's premise";
  }
  // Learns the weight, saves the result of `make` in a scope, and reads it.
  void SaveAndRead(const at::Tensor& weight,
                   const std::function<at::Tensor(const at::Tensor&)>& make) {
    Learn(weight);
    at::Tensor expected;
    at::Tensor y = InScope(world_.session(), [&] {
      at::Tensor made = make(weight);
      expected = OnHost(made);
      return Observe(carrier_, {std::exchange(made, at::Tensor())}, &seen_);
    });
    y.backward();
    ASSERT_EQ(seen_.size(), 1u);
    EXPECT_TRUE(SameBytes(seen_[0], expected));
    EXPECT_EQ(seen_[0].strides(), expected.strides());
  }
  // Expects the result of `make` to be offloaded like any other tensor.
  void ExpectMoves(const at::Tensor& weight,
                   const std::function<at::Tensor(const at::Tensor&)>& make) {
    SaveAndRead(weight, make);
    EXPECT_EQ(stats().offloaded, 2u) << "with the first scope's";
    EXPECT_EQ(stats().cast_again, 0u);
  }
  void ExpectIsCastAgain(const at::Tensor& weight,
                         const std::function<at::Tensor(const at::Tensor&)>& make) {
    SaveAndRead(weight, make);
    EXPECT_EQ(stats().cast_again, 1u);
    EXPECT_EQ(stats().recast, 1u);
    EXPECT_EQ(stats().offloaded, 1u) << "the first scope's";
  }
};

// ------------------------------------------------------------------------------ what is recast

TEST_F(OffloadCast, NothingOfACastIsCopiedFromTheSecondScopeOn) {
  const std::vector<at::Tensor> weights = {NewWeight(1), NewWeight(2), NewWeight(3)};
  for (uint64_t step = 0; step < 4; ++step) {
    SCOPED_TRACE(step);
    std::vector<at::Tensor> seen(weights.size());
    at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
      for (size_t i = 0; i < weights.size(); ++i) {
        y = Probe(y, {Cast(weights[i])},
                  [&seen, i](const at::Tensor& g, const UnpackSaved& unpack) {
                    seen[i] = OnHost(unpack()[0]);
                    return g;
                  });
      }
    });
    y.backward();
    y.reset();
    for (size_t i = 0; i < weights.size(); ++i) {
      EXPECT_TRUE(SameBytes(seen[i], Cast(weights[i])));
      Step(weights[i]);
    }
    const OffloadStats now = world_.QuietStats();
    EXPECT_EQ(now.offloaded, 3u);
    EXPECT_EQ(now.fetched_bytes, 3 * kCastBytes);
    EXPECT_EQ(engine().d2h.submitted_bytes, 3 * kCastBytes);
    EXPECT_EQ(now.cast_again, 3 * step);
    EXPECT_EQ(now.recast, 3 * step);
    EXPECT_EQ(now.packed, now.offloaded + now.cast_again + now.shared + now.kept());
  }
  world_.ExpectNothingLeft();
}

TEST_F(OffloadCast, TheMemoryOfACastGoesWithTheProgramsLastReferenceToIt) {
  const at::Tensor weight = LearnedWeight();
  const uint64_t before = device_bytes();
  at::Tensor held;
  const at::Tensor y = InScope(world_.session(), [&] {
    held = Cast(weight);
    return Observe(carrier_, {held}, &seen_);
  });
  const uint64_t with_cast = device_bytes();
  held.reset();
  EXPECT_EQ(with_cast - device_bytes(), kCastBytes);
  EXPECT_LE(device_bytes() - before, 512u) << "the node's output";
}

TEST_F(OffloadCast, ACastThatTheProgramStillHoldsIsUsedAsItIs) {
  const at::Tensor weight = LearnedWeight();
  at::Tensor held;
  const at::Tensor y = InScope(world_.session(), [&] {
    held = Cast(weight);
    return Observe(carrier_, {held.t()}, &seen_);
  });
  const uint64_t reused = stats().reused_on_device;
  y.backward();
  EXPECT_EQ(seen_[0].const_data_ptr(), held.const_data_ptr());
  EXPECT_EQ(stats().reused_on_device, reused + 1);
  EXPECT_EQ(stats().recast, 0u);
}

TEST_F(OffloadCast, ViewsAndTheirBaseAreOneCastInBothDirections) {
  const at::Tensor weight = LearnedWeight();
  const at::Tensor y = InScope(world_.session(), [&] {
    const at::Tensor cast = Cast(weight);
    return Observe(carrier_, {cast.t(), cast, cast.view({-1})}, &seen_);
  });
  y.backward();
  const at::Tensor expected = OnHost(Cast(weight));
  EXPECT_TRUE(SameBytes(seen_[0], expected.t()));
  EXPECT_EQ(seen_[0].strides(), at::IntArrayRef({1, kSide}));
  EXPECT_TRUE(SameBytes(seen_[1], expected));
  EXPECT_TRUE(SameBytes(seen_[2], expected.view({-1})));
  EXPECT_EQ(seen_[0].const_data_ptr(), seen_[2].const_data_ptr());
  EXPECT_EQ(stats().cast_again, 1u);
  EXPECT_EQ(stats().shared, 2u);
  EXPECT_EQ(stats().recast, 1u);
}

// Tied weights: two layers share a parameter, and autocast casts it once.
TEST_F(OffloadCast, ReadersThatAreDoneBeforeTheNextOneBeginsHaveACastEach) {
  const at::Tensor weight = LearnedWeight();
  const at::Tensor expected = OnHost(Cast(weight));
  int same = 0;
  const auto look = [&](const at::Tensor& grad, const UnpackSaved& unpack) {
    same += SameBytes(unpack()[0], expected);
    return grad;
  };
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    const at::Tensor cast = Cast(weight);
    y = Probe(y, {cast}, look);
    y = Observe(y, {activation({kSide, kSide})}, &seen_);
    y = Probe(y, {cast}, look);
  });
  y.backward();
  EXPECT_EQ(same, 2);
  EXPECT_EQ(stats().cast_again, 1u);
  EXPECT_EQ(stats().recast, 2u);
}

TEST_F(OffloadCast, AGraphThatIsKeptIsReadAsOftenAsItsReaderLikes) {
  const at::Tensor weight = LearnedWeight();
  const at::Tensor y =
      InScope(world_.session(), [&] { return Observe(carrier_, {Cast(weight)}, &seen_); });
  for (const bool retain : {true, true, false}) {
    y.backward({}, retain);
    EXPECT_TRUE(SameBytes(std::exchange(seen_, {})[0], Cast(weight)));
  }
  EXPECT_EQ(stats().recast, 3u);
}

// The engine takes over a returned gradient and adds to it, unless it has other references.
TEST_F(OffloadCast, ACastThatIsAGradientIsNotChangedForItsOtherReaders) {
  const at::Tensor weight = LearnedWeight();
  const at::Tensor x = Randn(world_.device(), {kSide, kSide}, 7).to(at::kBFloat16).requires_grad_();
  std::vector<std::string> order;
  at::Tensor read_last, added, read_first;
  {
    const OffloadScope scope(world_.session());
    const at::Tensor cast = Cast(weight);
    read_last = Probe(x, {cast}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      order.emplace_back("reads");
      seen_ = {OnHost(unpack()[0])};
      return grad;
    });
    added = Probe(x, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
      order.emplace_back("adds");
      return at::mul(grad, 3);
    });
    read_first = Probe(x, {cast}, [&](const at::Tensor&, const UnpackSaved& unpack) {
      order.emplace_back("returns");
      return unpack()[0];
    });
  }
  (read_first + added + read_last).sum().backward();
  EXPECT_THAT(order, ::testing::ElementsAre("returns", "adds", "reads")) << "the test's premise";
  EXPECT_TRUE(SameBytes(seen_[0], Cast(weight)));
}

TEST_F(OffloadCast, AWeightOfConvolutionsKeepsItsLayout) {
  at::Tensor weight = Randn(world_.device(), {32, 16, 3, 3}, 1);
  weight = weight.contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  ASSERT_FALSE(weight.is_contiguous()) << "the test's premise";
  ExpectIsCastAgain(weight, Cast);
}

TEST_F(OffloadCast, TheOtherLowPrecisionIsCastAgainAsWell) {
  ExpectIsCastAgain(NewWeight(1), [](const at::Tensor& weight) { return weight.to(at::kHalf); });
}

TEST_F(OffloadCast, AnInnerScopeGoesOnWithWhatTheOuterOneKnows) {
  const at::Tensor weight = LearnedWeight();
  {
    const OffloadScope outer(world_.session());
    Learn(weight);
    EXPECT_EQ(stats().cast_again, 1u);
    Step(weight);
    Learn(weight);
    EXPECT_EQ(stats().cast_again, 1u) << "the outer scope has noted what the weight was before";
  }
  Learn(weight);
  EXPECT_EQ(stats().cast_again, 2u);
}

TEST_F(OffloadCast, ASessionTellsWhoAsksWhatIsComputedAgain) {
  struct Watcher : public SavedTensorWatcher {
    struct Watched : public SavedTensor {
      at::Tensor Unpack() override {
        at::Tensor tensor = saved->Unpack();
        owner->was.push_back(saved->WasComputedAgain());
        return tensor;
      }
      std::unique_ptr<SavedTensor> saved;
      Watcher* owner = nullptr;
    };
    std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place,
                                      SavedTensorPacker* packer) override {
      auto watched = std::make_unique<Watched>();
      watched->saved = packer->Pack(tensor, place);
      watched->owner = this;
      is.push_back(watched->saved->IsComputedAgain());
      return watched;
    }
    void OnSegmentKept(const SegmentBegin&, uint32_t) override {}
    void RunAside(absl::FunctionRef<void()> work) override { work(); }
    std::vector<bool> is, was;
  };
  const at::Tensor weight = LearnedWeight();
  const auto watcher = std::make_shared<Watcher>();
  at::Tensor held;
  const at::Tensor y = InScope(world_.session(), [&] {
    const WatchScope watch(watcher);
    return Observe(carrier_, {Cast(weight), activation({kSide, kSide})}, &seen_);
  });
  y.backward({}, /*keep_graph=*/true);
  held = seen_[0];
  y.backward();
  EXPECT_THAT(watcher->is, ::testing::ElementsAre(true, false));
  EXPECT_THAT(watcher->was, ::testing::ElementsAre(true, false, false, false));
}

// ---------------------------------------------------------------------------------- what moves

// A GAN's discriminator: its optimizer steps while the casts are still in use.
TEST_F(OffloadCast, ACastThatIsOlderThanItsParameterIsByNowMoves) {
  ExpectMoves(NewWeight(1), [](const at::Tensor& weight) {
    at::Tensor cast = Cast(weight);
    Step(weight);
    return cast;
  });
}

TEST_F(OffloadCast, ACastThatIsOlderThanAStepThatRaisesNoVersionMoves) {
  ExpectMoves(NewWeight(1), [](const at::Tensor& weight) {
    at::Tensor cast = Cast(weight);
    FusedStep(weight);
    return cast;
  });
}

TEST_F(OffloadCast, ACastThatIsSavedOnceMoreAfterAStepMovesThen) {
  const at::Tensor weight = LearnedWeight();
  std::vector<at::Tensor> late;
  at::Tensor early, expected;
  const at::Tensor y = InScope(world_.session(), [&] {
    const at::Tensor cast = Cast(weight);
    expected = OnHost(cast);
    early = Observe(carrier_, {cast}, &seen_);
    Step(weight);
    return Observe(carrier_, {cast}, &late);
  });
  EXPECT_EQ(stats().cast_again, 1u);
  EXPECT_EQ(stats().offloaded, 2u);
  y.backward();
  EXPECT_TRUE(SameBytes(late[0], expected));
}

TEST_F(OffloadCast, ACastFromBeforeItsScopeMoves) {
  const at::Tensor weight = LearnedWeight();
  at::Tensor cast = Cast(weight);
  const at::Tensor expected = OnHost(cast);
  Step(weight);
  const at::Tensor y = InScope(world_.session(), [&] {
    return Observe(carrier_, {std::exchange(cast, at::Tensor())}, &seen_);
  });
  y.backward();
  EXPECT_TRUE(SameBytes(seen_[0], expected));
  EXPECT_EQ(stats().cast_again, 0u);
}

TEST_F(OffloadCast, ACastThatAnotherThreadHasMadeMoves) {
  ExpectMoves(NewWeight(1), [](const at::Tensor& weight) {
    at::Tensor cast;
    std::thread([&, state = at::ThreadLocalState()] {
      const at::ThreadLocalStateGuard guard(state);
      // More than on the scope's thread, so that node numbers alone cannot tell the threads apart.
      for (int i = 0; i < 1000; ++i) cast = Cast(weight);
    }).join();
    return cast;
  });
}

TEST_F(OffloadCast, ACastThatWasWrittenMoves) {
  ExpectMoves(NewWeight(1), [](const at::Tensor& weight) {
    at::Tensor cast = Cast(weight);
    const c10::NoGradGuard no_grad;
    cast.mul_(3);
    return cast;
  });
}

TEST_F(OffloadCast, ACastInAnotherLayoutMoves) {
  ExpectMoves(NewWeight(1, {16, 16, 8, 8}), [](const at::Tensor& weight) {
    return weight.to(at::kBFloat16, /*non_blocking=*/false, /*copy=*/false,
                     at::MemoryFormat::ChannelsLast);
  });
}

// Writes to the flat buffer raise no version of the parameter.
TEST_F(OffloadCast, ACastOfAPartOfAFlatBufferMoves) {
  const at::Tensor flat = Randn(world_.device(), {2 * kSide, kSide}, 1);
  at::Tensor weight = at::ones({kSide, kSide}, flat.options()).requires_grad_();
  weight.set_data(flat.narrow(0, 0, kSide));
  ExpectMoves(weight, [&](const at::Tensor& parameter) {
    at::Tensor cast = Cast(parameter);
    flat.mul_(2);
    return cast;
  });
}

TEST_F(OffloadCast, ASmallPartOfACastMoves) {
  ExpectMoves(NewWeight(1),
              [](const at::Tensor& weight) { return Cast(weight).narrow(0, 3, kSide / 4); });
}

TEST_F(OffloadCast, WhatIsMoreThanACastMoves) {
  ExpectMoves(NewWeight(1),
              [](const at::Tensor& weight) { return at::cumsum(weight, 0, at::kBFloat16); });
}

TEST_F(OffloadCast, NothingIsCastAgainWithTheOptionOff) {
  OffloadOptions options = SmallWindows(1);
  options.cast_weights_again = false;
  const std::shared_ptr<OffloadSession> session = world_.NewSession(options);
  const at::Tensor weight = NewWeight(1);
  for (int step = 0; step < 3; ++step) {
    at::Tensor expected;
    const at::Tensor y = InScope(session, [&] {
      expected = OnHost(Cast(weight));
      return Observe(carrier_, {Cast(weight)}, &seen_);
    });
    Step(weight);
    y.backward();
    EXPECT_TRUE(SameBytes(seen_[0], expected));
  }
  EXPECT_EQ(session->GetStats().cast_again, 0u);
  EXPECT_EQ(session->GetStats().offloaded, 3u);
}

// A step that deviates from its plan runs like an unplanned one: resident tensors are offloaded.
TEST_F(OffloadCast, ACastThatWasToStayIsLetGoOfWhenAllLeaves) {
  const std::shared_ptr<OffloadSession> session = world_.NewSession(WithTarget(64 * kMiB));
  const at::Tensor weight = NewWeight(1);
  for (const int64_t rows : {kSide, kSide, kSide, kSide / 2}) {
    const OffloadStats before = session->GetStats();
    const uint64_t bytes_before = device_bytes();
    const bool is_planned = before.packed > 0 && rows == kSide;
    const bool is_let_go_of = rows != kSide;
    std::vector<at::Tensor> seen;
    at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
      y = Observe(y, {Cast(weight)}, &seen_);
      y = Observe(y, {activation({rows, kSide})}, &seen);
    });
    ASSERT_TRUE(world_.Synchronize().ok());
    const OffloadStats after = session->GetStats();
    EXPECT_EQ(after.kept_as_planned - before.kept_as_planned, is_planned ? 2u : 0u);
    EXPECT_EQ(after.cast_again - before.cast_again, is_let_go_of ? 1u : 0u);
    if (is_let_go_of) {
      EXPECT_LT(device_bytes(), bytes_before + kCastBytes);
    }
    y.backward();
    EXPECT_TRUE(SameBytes(std::exchange(seen_, {})[0], Cast(weight)));
    y.reset();
    Step(weight);
  }
  EXPECT_EQ(session->GetStats().recast, 1u);
}

// Such a cast is a tensor like any other, for its readers too.
TEST_F(OffloadCast, ACastThatWasToStayMovesIfItsParameterHasChangedWhenAllLeaves) {
  const std::shared_ptr<OffloadSession> session = world_.NewSession(WithTarget(64 * kMiB));
  const at::Tensor weight = NewWeight(1);
  for (const int64_t rows : {kSide, kSide, kSide, kSide / 2}) {
    const OffloadStats before = session->GetStats();
    const bool leaves = rows != kSide;
    std::vector<at::Tensor> seen;
    at::Tensor expected;
    at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
      at::Tensor cast = Cast(weight);
      expected = OnHost(cast);
      y = Observe(y, {std::exchange(cast, at::Tensor())}, &seen_);
      if (leaves) Step(weight);
      y = Observe(y, {activation({rows, kSide})}, &seen);
    });
    y.backward();
    EXPECT_TRUE(SameBytes(std::exchange(seen_, {})[0], expected));
    if (!leaves) continue;
    EXPECT_EQ(session->GetStats().cast_again, before.cast_again);
    EXPECT_EQ(session->GetStats().offloaded - before.offloaded, 2u);
    EXPECT_EQ(session->GetStats().recast, 0u);
  }
}

TEST_F(OffloadCast, ACastThatStaysIsSharedThoughItsParameterHasChanged) {
  const std::shared_ptr<OffloadSession> session = world_.NewSession(WithTarget(64 * kMiB));
  const at::Tensor weight = NewWeight(1);
  for (const bool changes : {false, false, false, true}) {
    const OffloadStats before = session->GetStats();
    std::vector<at::Tensor> seen;
    at::Tensor expected;
    at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
      const at::Tensor cast = Cast(weight);
      expected = OnHost(cast);
      y = Observe(y, {cast}, &seen_);
      if (changes) Step(weight);
      y = Observe(y, {cast}, &seen);
    });
    EXPECT_EQ(session->GetStats().shared - before.shared, 1u);
    y.backward();
    EXPECT_TRUE(SameBytes(std::exchange(seen_, {})[0], expected));
    EXPECT_TRUE(SameBytes(seen[0], expected));
  }
}

// ------------------------------------------------------------------------------------ what fails

class OffloadCastErrors : public OffloadCast {
 protected:
  // Returns the error of a backward if `change` modifies the weight of the saved cast before it.
  std::string ErrorAfter(const std::function<void(at::Tensor&)>& change) {
    at::Tensor weight = LearnedWeight();
    const at::Tensor y =
        InScope(world_.session(), [&] { return Observe(carrier_, {Cast(weight).t()}, &seen_); });
    change(weight);
    return ErrorOf([&] { y.backward(); });
  }
};

TEST_F(OffloadCastErrors, AParameterThatChangesBeforeItsBackwardIsNamedWithTheRemedy) {
  EXPECT_THAT(ErrorAfter(Step),
              AllOf(HasSubstr("changed in place"), HasSubstr("[BFloat16 [128, 128]]"),
                    HasSubstr("[Float [128, 128]]"),
                    HasSubstr("OffloadOptions::cast_weights_again to false")));
}

TEST_F(OffloadCastErrors, AChangeThatRaisesNoVersionIsSeenWhereLibTorchItselfMakesIt) {
  EXPECT_THAT(ErrorAfter(FusedStep), HasSubstr("changed in place"));
}

TEST_F(OffloadCastErrors, AParameterWithOtherMemoryIsFoundOut) {
  EXPECT_THAT(ErrorAfter([](at::Tensor& weight) { weight.set_data(weight.detach().clone()); }),
              HasSubstr("given other memory"));
}

TEST_F(OffloadCastErrors, AParameterThatLiesOtherwiseInItsMemoryIsFoundOut) {
  EXPECT_THAT(ErrorAfter([](at::Tensor& weight) { weight.set_data(weight.detach().t()); }),
              HasSubstr("changed in place"));
}

class OffloadCastVerify : public OffloadCast {
 protected:
  static OffloadOptions Verifying() {
    OffloadOptions options = SmallWindows(1);
    options.verify = true;
    return options;
  }
  OffloadCastVerify() : OffloadCast(Verifying()) {}
};

TEST_F(OffloadCastVerify, WhatIsCastAgainIsComparedWithWhatWasSaved) {
  const at::Tensor weight = NewWeight(1);
  const auto save = [&] {
    return InScope(world_.session(), [&] { return Observe(carrier_, {Cast(weight)}, &seen_); });
  };
  save().backward();
  save().backward();
  EXPECT_EQ(stats().recast, 1u);
  EXPECT_EQ(stats().verified, 2u);
  const at::Tensor y = save();
  seen_.clear();
  weight.variable_data().mul_(2);  // has a version counter of its own
  EXPECT_THAT(ErrorOf([&] { y.backward(); }),
              AllOf(HasSubstr("verify mode"), HasSubstr("cast again"),
                    HasSubstr("BFloat16 [128, 128]"), HasSubstr("raises no version")));
}

TEST_F(OffloadCastVerify, ACastWithoutMemoryForItsChecksumIsSavedLikeAnyOther) {
  const at::Tensor weight = LearnedWeight();
  constexpr uint64_t kForOutput = 4 << 10;
  at::Tensor expected;
  const at::Tensor y = InScope(world_.session(), [&] {
    at::Tensor cast = Cast(weight);
    expected = OnHost(cast);
    EXPECT_TRUE(world_.machine().SetMemoryLimit(0, world_.device_bytes() + kForOutput).ok());
    at::Tensor out = Observe(carrier_, {std::exchange(cast, at::Tensor())}, &seen_);
    EXPECT_TRUE(world_.machine().SetMemoryLimit(0, MachineOptions().memory_bytes).ok());
    return out;
  });
  y.backward();
  EXPECT_TRUE(SameBytes(seen_.back(), expected));
  EXPECT_EQ(stats().cast_again, 0u);
  EXPECT_EQ(stats().offloaded, 2u) << "the first one when the weight was learned";
}

// ------------------------------------------------------------------------------- streams, memory

TEST_F(OffloadCast, ReadersOnTwoStreamsShareACast) {
  const at::Tensor weight = LearnedWeight();
  const at::Tensor expected = OnHost(Cast(weight));
  std::vector<at::Tensor> seen;
  const auto read_on = [&](const c10::Stream& stream) {
    return [&seen, stream](const at::Tensor& grad, const UnpackSaved& unpack) {
      const c10::StreamGuard guard(stream);
      seen.push_back(unpack()[0]);
      seen.push_back(at::mul(seen.back(), 1));
      return grad;
    };
  };
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    const at::Tensor cast = Cast(weight);
    y = Probe(y, {cast}, read_on(world_.NewStream()));
    y = Probe(y, {cast}, read_on(world_.NewStream()));
  });
  y.backward();
  ASSERT_TRUE(world_.Synchronize().ok());
  EXPECT_EQ(seen[0].const_data_ptr(), seen[2].const_data_ptr());
  EXPECT_TRUE(SameBytes(seen[1], expected));
  EXPECT_TRUE(SameBytes(seen[3], expected));
  EXPECT_EQ(stats().recast, 1u);
}

// Autograd would keep the cast until backward. Here it is freed while a side stream still reads.
TEST_F(OffloadCast, TheMemoryOfACastThatAForkReadsIsNotReusedBeforeItHas) {
  const at::Tensor weight = LearnedWeight();
  const c10::Stream fork = world_.NewStream();
  at::Tensor y, read;
  const at::Tensor expected = OnHost(Cast(weight));
  {
    const OffloadScope scope(world_.session());
    at::Tensor cast = Cast(weight);
    ASSERT_TRUE(world_.Synchronize().ok());
    {
      const c10::StreamGuard guard(fork);
      y = Observe(carrier_, {cast}, &seen_);
      read = at::mul(cast.detach(), 1);
    }
    cast.reset();
    for (int i = 0; i < 4; ++i) activation({kSide, kSide / 2}, 7);  // reuses its memory
  }
  ASSERT_TRUE(world_.Synchronize().ok());
  EXPECT_TRUE(SameBytes(read, expected));
}

// Each replay of the graph would recast the weight's value of that time.
TEST_F(OffloadCast, NothingIsCastIntoAGraphThatIsCaptured) {
  const at::Tensor weight = LearnedWeight();
  const c10::Stream side = world_.NewStream();
  const StreamHandle native(side.native_handle());
  std::string error;
  const at::Tensor y = InScope(world_.session(), [&] {
    return Probe(carrier_, {Cast(weight)}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      const c10::StreamGuard guard(side);
      EXPECT_TRUE(world_.machine().SetCapturing(native, true).ok());
      error = ErrorOf([&] { unpack(); });
      EXPECT_TRUE(world_.machine().SetCapturing(native, false).ok());
      return grad;
    });
  });
  y.backward();
  EXPECT_THAT(error, HasSubstr("the stream captures a graph"));
}

TEST_F(OffloadCast, ACastThatFindsNoMemoryTakesThatOfUnreadPrefetches) {
  const std::shared_ptr<OffloadSession> session = world_.NewSession(Windows(1, kMiB));
  const at::Tensor weight = NewWeight(1);
  const at::Tensor expected = OnHost(Cast(weight));
  for (const bool known : {false, true}) {
    bool same = false;
    const at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
      y = Probe(y, {activation({kSide, kSide}, 1)}, Read);
      y = Probe(y, {Cast(weight)}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
        if (known) {
          EXPECT_TRUE(world_.machine().SetMemoryLimit(0, device_bytes()).ok());
        }
        same = SameBytes(unpack()[0].detach().cpu(), expected);
        EXPECT_TRUE(world_.machine().SetMemoryLimit(0, device_bytes() + kMiB).ok());
        return grad;
      });
      y = Probe(y, {activation({kSide, kSide}, 2)}, Read);  // prefetches the other one
    });
    const uint64_t dropped = session->GetStats().prefetches_dropped;
    y.backward();
    EXPECT_TRUE(same);
    if (known) {
      EXPECT_EQ(session->GetStats().recast, 1u);
      EXPECT_GT(session->GetStats().prefetches_dropped, dropped);
    }
  }
}

}  // namespace offload_cast_test
}  // namespace pinion::testing
