// Checks which saved tensors are offloaded, and that all are restored unchanged.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/add.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class OffloadRules : public OffloadFixture {
 protected:
  explicit OffloadRules(const EmulatedOptions& machine = MachineOptions())
      : OffloadFixture(SmallWindows(1), machine) {}

  // Saves tensors in a scope; only the caller and autograd reference them.
  at::Tensor Save(const std::vector<at::Tensor>& tensors) {
    const OffloadScope scope(world_.session());
    return Observe(carrier_, tensors, &seen_);
  }
};

// A node that changes its saved tensor.
at::Tensor ChangeSaved(const at::Tensor& grad, const UnpackSaved& unpack) {
  const c10::NoGradGuard no_grad;
  unpack()[0].add_(1);
  return grad;
}

class OffloadRulesRecycling : public OffloadRules {
 protected:
  OffloadRulesRecycling() : OffloadRules(ImmediateReuse()) {}

  static EmulatedOptions ImmediateReuse() {
    EmulatedOptions options = MachineOptions();
    options.reuse = ReuseMode::kImmediate;
    return options;
  }
};

class OffloadRulesInPlace : public OffloadRules {
 protected:
  OffloadRulesInPlace() : OffloadRules(RacesAllowed()) {}
};

// --- Views ---

// TRL keeps a storage's second view, and so all of it, on the device: the copy frees nothing.
TEST_F(OffloadRules, ViewsShareOneCopyAndComeBackWithTheirStrides) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> views = {
      [](const at::Tensor& t) { return t; },
      [](const at::Tensor& t) { return t.transpose(0, 2); },
      [](const at::Tensor& t) { return t.chunk(3, -1)[1]; },
      [](const at::Tensor& t) { return t.slice(0, 1, 7, 2); },
      [](const at::Tensor& t) {
        return t.select(0, 3).unsqueeze(0).expand({5, -1, -1});
      },
      [](const at::Tensor& t) { return t.view({-1}).slice(0, 100, 900); },
  };
  at::Tensor base = activation({8, 16, 24});
  const at::Tensor expected = ActivationValues({8, 16, 24});
  std::vector<at::Tensor> saved;
  for (const auto& view : views) saved.push_back(view(base));
  const at::Tensor y = Save(saved);
  EXPECT_EQ(stats().offloaded, 1u);
  EXPECT_EQ(stats().shared, views.size() - 1);
  EXPECT_EQ(stats().offloaded_bytes, base.nbytes());

  saved.clear();
  base.reset();
  y.backward();
  EXPECT_EQ(stats().fetched_bytes, expected.nbytes());
  ASSERT_EQ(seen_.size(), views.size());
  for (size_t i = 0; i < views.size(); ++i) {
    SCOPED_TRACE("view " + std::to_string(i));
    const at::Tensor view = views[i](expected);
    EXPECT_EQ(seen_[i].sizes(), view.sizes());
    EXPECT_EQ(seen_[i].strides(), view.strides());
    EXPECT_EQ(seen_[i].storage_offset(), view.storage_offset());
    EXPECT_TRUE(SameBytes(seen_[i], view));
    EXPECT_TRUE(seen_[i].is_alias_of(seen_[0]));
  }
}

TEST_F(OffloadRules, ChannelsLastComesBackAsChannelsLast) {
  at::Tensor image = activation({2, 3, 8, 8}).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor expected =
      ActivationValues({2, 3, 8, 8}).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor y = Save({image});
  image.reset();
  y.backward();
  EXPECT_EQ(seen_[0].strides(), expected.strides());
  EXPECT_TRUE(seen_[0].is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_TRUE(SameBytes(seen_[0], expected));
}

// TRL's broadcast branch copies the whole storage even for a small view of a huge one, such as
// FSDP's flat parameters.
TEST_F(OffloadRules, ASmallViewOfALargeStorageDoesNotMoveAllOfIt) {
  at::Tensor flat = activation({64 << 10});
  const at::Tensor y = Save({flat.slice(0, 5000, 6024), flat.slice(0, 40001, 41025)});
  EXPECT_EQ(stats().offloaded, 2u);
  EXPECT_LE(stats().offloaded_bytes, 2 * (4 * kKiB + 512));
  flat.reset();
  y.backward();
  const at::Tensor expected = ActivationValues({64 << 10});
  EXPECT_TRUE(SameBytes(seen_[0], expected.slice(0, 5000, 6024)));
  EXPECT_TRUE(SameBytes(seen_[1], expected.slice(0, 40001, 41025)));
}

TEST_F(OffloadRules, AViewInsideAPartThatWasCopiedSharesIt) {
  at::Tensor flat = activation({64 << 10});
  const at::Tensor y = Save({flat.slice(0, 5000, 6024), flat.slice(0, 5100, 5800)});
  EXPECT_EQ(stats().offloaded, 1u);
  EXPECT_EQ(stats().shared, 1u);
  flat.reset();
  y.backward();
  EXPECT_TRUE(SameBytes(seen_[1], ActivationValues({64 << 10}).slice(0, 5100, 5800)));
}

TEST_F(OffloadRules, EveryTypeComesBackBitByBit) {
  const std::vector<at::ScalarType> types = {at::kDouble,   at::kFloat,         at::kHalf,
                                             at::kBFloat16, at::kFloat8_e4m3fn, at::kLong,
                                             at::kByte,     at::kBool,          at::kComplexFloat};
  std::vector<std::vector<at::Tensor>> seen(types.size());
  std::vector<at::Tensor> expected;
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    for (size_t i = 0; i < types.size(); ++i) {
      expected.push_back(ActivationValues({40, 60}, static_cast<int>(i)).to(types[i]));
      // Without history, like a mask, and referenced only by its node.
      y = Observe(y, {expected.back().to(world_.device())}, &seen[i]);
    }
  });
  EXPECT_EQ(stats().offloaded, types.size());
  y.backward();
  EXPECT_EQ(stats().reused_on_device, 0u);
  for (size_t i = 0; i < types.size(); ++i) {
    EXPECT_EQ(seen[i].at(0).scalar_type(), types[i]);
    EXPECT_TRUE(SameBytes(seen[i][0], expected[i])) << c10::toString(types[i]);
  }
}

// --- Which tensors ---

TEST_F(OffloadRules, TheSmallestThatIsOffloadedHasMinOffloadBytes) {
  const at::TensorOptions bytes = at::TensorOptions(world_.device()).dtype(at::kByte);
  const at::Tensor y = InScope(world_.session(), [&] {
    return Observe(carrier_,
                   {activation({1023 / 4}), activation({1024 / 4}), at::zeros({1023}, bytes),
                    at::zeros({1024}, bytes)},
                   &seen_);
  });
  EXPECT_EQ(stats().kept_small, 2u);
  EXPECT_EQ(stats().offloaded, 2u);
  EXPECT_EQ(stats().offloaded_bytes, 2 * 1024u);
}

// The copied bytes count, not the logical ones.
TEST_F(OffloadRules, AnExpandedScalarIsSmall) {
  const at::Tensor y = Save({activation({1}).expand({4096})});
  EXPECT_EQ(stats().kept_small, 1u);
}

// TRL offloaded views of parameters as activations (trl#4247).
// Autograd saves Linear's weight as a view of it, which is no leaf.
TEST_F(OffloadRules, LinearsWeightStaysAlthoughItArrivesAsAView) {
  const at::Tensor weight =
      at::ones({64, 64}, at::TensorOptions(world_.device())).requires_grad_(true);
  {
    const OffloadScope scope(world_.session());
    at::linear(activation({32, 64}), weight);
  }
  EXPECT_EQ(stats().kept_parameter, 1u);
  EXPECT_EQ(stats().offloaded, 1u);  // the layer's input
}

// Copying an externally referenced tensor frees nothing.
TEST_F(OffloadRules, AnInputThatTheUserHoldsIsNotCopied) {
  const at::Tensor input = ActivationValues({32, 32}).to(world_.device());
  const at::Tensor y = Save({input});
  EXPECT_EQ(stats().kept_held, 1u);
  EXPECT_EQ(stats().offloaded, 0u);
  EXPECT_EQ(engine().d2h.submitted_bytes, 0u);
  y.backward();
  EXPECT_TRUE(SameBytes(seen_[0], input));
}

// A mask is a leaf like an input, but only the operator that saves it references it.
TEST_F(OffloadRules, ADropoutMaskIsOffloaded) {
  at::Tensor y = activation({128, 128});
  {
    const OffloadScope scope(world_.session());
    y = std::get<0>(at::native_dropout(y, 0.5, true));
    y = std::get<0>(at::native_dropout(y, 0.5, true));
    EXPECT_EQ(stats().offloaded_bytes, 2u * 128 * 128);
  }
  EXPECT_EQ(stats().kept_held, 0u);
  EXPECT_EQ(stats().offloaded, 2u);
  EXPECT_EQ(stats().evicted_not_freed, 0u);
  EXPECT_EQ(engine().d2h.submitted_bytes, 2u * 128 * 128);
}

TEST_F(OffloadRules, WhatIsNotAPlainTensorOfTheDevicePassesThrough) {
  const at::TensorOptions emu(world_.device());
  const at::Tensor complex =
      at::complex(ActivationValues({32, 32}), ActivationValues({32, 32}, 7)).to(world_.device());
  const at::Tensor host = ActivationValues({32, 32}, 3);
  const at::Tensor sparse = at::sparse_coo_tensor(at::zeros({1, 1}, at::kLong), at::ones({1}), {9});
  const at::Tensor y = Save({at::_conj(complex), at::_neg_view(host.to(world_.device())), host,
                             sparse, at::empty({0, 64}, emu)});
  EXPECT_EQ(stats().kept_unsupported, 5u);
  EXPECT_EQ(stats().packed, 5u);
  y.backward();
  EXPECT_TRUE(seen_[0].is_conj());
  EXPECT_TRUE(SameBytes(at::_conj(seen_[0]), complex));
  EXPECT_TRUE(seen_[1].is_neg());
  EXPECT_TRUE(SameBytes(at::_neg_view(seen_[1]), host));
  EXPECT_TRUE(SameBytes(seen_[2], host));
  EXPECT_TRUE(seen_[3].is_sparse());
  EXPECT_EQ(seen_[4].sizes(), at::IntArrayRef({0, 64}));
}

TEST_F(OffloadRules, ASessionWithoutATargetHasNoPlanToExplain) {
  const at::Tensor y = Save({activation({32, 32})});
  ASSERT_EQ(stats().offloaded, 1u);
  EXPECT_EQ(world_.session()->Explain(0), "");
}

TEST_F(OffloadRules, ACapturingStreamPassesThrough) {
  const at::Tensor t = activation({32, 32});
  const StreamHandle stream = world_.machine().default_stream(0);
  ASSERT_THAT(world_.machine().SetCapturing(stream, true), IsOk());
  const at::Tensor y = Save({t});
  ASSERT_THAT(world_.machine().SetCapturing(stream, false), IsOk());
  EXPECT_EQ(stats().kept_capturing, 1u);
  y.backward();
  EXPECT_TRUE(SameBytes(seen_[0], ActivationValues({32, 32})));
}

// Without offload, a retained graph keeps what a captured backward reads, for replays.
TEST_F(OffloadRules, ACapturedBackwardReadsNothingThatIsOffloaded) {
  std::vector<std::string> errors;
  const auto read_in_capture = [&](const at::Tensor& grad, const UnpackSaved& unpack) {
    EXPECT_TRUE(world_.Synchronize().ok());
    const StreamHandle stream = world_.machine().default_stream(0);
    EXPECT_TRUE(world_.machine().SetCapturing(stream, true).ok());
    errors.push_back(ErrorOf([&] { unpack(); }));
    EXPECT_TRUE(world_.machine().SetCapturing(stream, false).ok());
    return grad;
  };
  const at::Tensor weight = at::ones({64, 64}, at::TensorOptions(world_.device()));
  weight.requires_grad_(true);
  for (const uint64_t window_bytes : {1, 1 << 20}) {
    const auto session = world_.NewSession(Windows(window_bytes, kMiB));
    at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
      y = Probe(y, {weight}, read_in_capture);
      y = Probe(y, {activation({64, 64})}, read_in_capture);
      y = Observe(y, {activation({64, 64})}, &seen_);
    });
    y.backward({}, /*retain_graph=*/true);
    const OffloadStats stats = session->GetStats();
    // Of the two offloaded tensors, the one that is not read in a capture.
    EXPECT_EQ(stats.reused_on_device, window_bytes == 1 ? 0u : 1u) << "the test's premise";
    EXPECT_EQ(stats.prefetch_hits, 0u);
  }
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    y = Probe(y, {activation({64, 64})}, read_in_capture);
    y.backward({}, /*retain_graph=*/true);
  });
  constexpr const char* kRefused = "Capture its forward as well";
  EXPECT_THAT(errors, ElementsAre(HasSubstr(kRefused), "no error", HasSubstr(kRefused), "no error",
                                  HasSubstr(kRefused)));
}

// --- Identity ---

// trl#6241: a tracker keyed by address mistook a new tensor at a recycled address for one that it
// had copied. Backward got the dead tensor's bytes.
TEST_F(OffloadRulesRecycling, ARecycledAddressIsNotTheTensorThatLivedThere) {
  at::Tensor first = activation({64, 64}, 1);
  const at::Tensor source = activation({64, 64}, 2);
  const void* const address = first.const_data_ptr();
  std::vector<at::Tensor> seen_first;
  at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    y = Observe(y, {first}, &seen_first);
    first.reset();
  });
  {
    const OffloadScope scope(world_.session());
    // Memory freed behind pending work is only reused after that work.
    ASSERT_THAT(world_.Synchronize(), IsOk());
    std::vector<at::Tensor> others;
    at::Tensor second = at::mul(source, 1);
    while (second.const_data_ptr() != address && others.size() < 16) {
      others.push_back(std::exchange(second, at::mul(source, 1)));
    }
    if (TestsRunOnGpu() && second.const_data_ptr() != address) {
      GTEST_SKIP() << "the allocator gave other memory";
    }
    ASSERT_EQ(second.const_data_ptr(), address) << "the test's premise";
    y = Observe(y, {second}, &seen_);
  }
  EXPECT_EQ(stats().offloaded, 2u);
  y.backward();
  EXPECT_TRUE(SameBytes(seen_first[0], ActivationValues({64, 64}, 1)));
  EXPECT_TRUE(SameBytes(seen_[0], ActivationValues({64, 64}, 2)));
}

TEST_F(OffloadRulesInPlace, TheSameStorageAtAnotherVersionIsAnotherCopy) {
  at::Tensor t = activation({32, 32});
  std::vector<at::Tensor> seen_before;
  const at::Tensor before =
      InScope(world_.session(), [&] { return Observe(carrier_, {t}, &seen_before); });
  t.detach().add_(1000);
  const at::Tensor after = Save({t});
  EXPECT_EQ(stats().offloaded, 2u);
  t.reset();
  after.backward();
  EXPECT_TRUE(SameBytes(seen_[0], ActivationValues({32, 32}).add(1000)));
  EXPECT_THROW(before.backward(), c10::Error);
}

// A storage can have two version counters, which rise independently, so equal numbers say nothing.
TEST_F(OffloadRulesInPlace, TheSameNumberOfAnotherVersionCounterIsAnotherCopy) {
  at::Tensor t = activation({32, 32});
  at::Tensor other = t.variable_data();
  t.detach().add_(1);
  std::vector<at::Tensor> seen_first;
  const at::Tensor first =
      InScope(world_.session(), [&] { return Observe(carrier_, {t}, &seen_first); });
  other.add_(1);
  const at::Tensor second = Save({other});
  t.reset();
  other.reset();
  second.backward();
  EXPECT_TRUE(SameBytes(seen_[0], ActivationValues({32, 32}).add(2)));
}

// A save through another counter in between means that the bytes may have changed, so the third
// save gets a copy of its own.
TEST_F(OffloadRulesInPlace, ASaveAtAnotherCounterEndsTheSharingOfOlderCopies) {
  at::Tensor t = activation({32, 32});
  at::Tensor other = t.variable_data();
  std::vector<at::Tensor> seen_other;
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    y = Observe(y, {t}, &seen_);
    other.add_(1);  // raises no version of `t`
    y = Observe(y, {other}, &seen_other);
    y = Observe(y, {t}, &seen_);
  });
  EXPECT_EQ(stats().shared, 0u);
  EXPECT_EQ(stats().offloaded, 2u);
  EXPECT_EQ(stats().kept_held, 1u) << "the one in between, a leaf";
  t.reset();
  other.reset();
  y.backward();
  EXPECT_TRUE(SameBytes(seen_other.at(0), ActivationValues({32, 32}).add(1)));
}

TEST_F(OffloadRulesInPlace, ASaveOfOtherBytesAtAnotherCounterEndsNoSharing) {
  at::Tensor t = activation({8192});
  const at::Tensor slice = t.narrow(0, 2048, 2048);
  std::vector<at::Tensor> seen_other;
  const OffloadScope scope(world_.session());
  at::Tensor y = Observe(carrier_, {slice}, &seen_);
  for (const int64_t neighbour : {0, 4096}) {
    y = Observe(y, {t.variable_data().narrow(0, neighbour, 2048)}, &seen_other);
  }
  y = Observe(y, {slice}, &seen_);
  EXPECT_EQ(stats().shared, 1u);
}

// --- Changes in place after saving ---

// Returns autograd's error for a square whose operand was changed.
std::string SquareThenChange(EmuWorld& world, bool offload, int64_t size, bool hold) {
  const at::Tensor a =
      at::ones({size}, at::TensorOptions(world.device())).mul(4).requires_grad_(true);
  at::Tensor b;
  const at::Tensor loss = InScope(offload ? world.session() : nullptr, [&] {
    b = at::mul(a, 1);
    return at::sum(at::mul(b, b));
  });
  b.detach().add_(200);
  if (!hold) b.reset();
  const std::string error = ErrorOf([&] { loss.backward(); });
  EXPECT_FALSE(a.grad().defined()) << "of a backward that should not have run";
  return error;
}

// Saved-tensor hooks disable autograd's own check. A hook that returns the kept tensor unchecked,
// like TRL's, gives a gradient of 408 instead of 8.
TEST_F(OffloadRulesInPlace, AChangeAfterSavingRaisesWhatAutogradRaises) {
  for (const int64_t size : {16, 1024}) {    // too small to offload; offloaded
    for (const bool hold : {true, false}) {  // still on the device in backward, or not
      SCOPED_TRACE("size " + std::to_string(size) + (hold ? ", held" : ", gone"));
      for (const bool offload : {false, true}) {
        EXPECT_THAT(SquareThenChange(world_, offload, size, hold), HasSubstr(kInPlaceMessage));
      }
    }
  }
  EXPECT_GT(stats().kept_small, 0u);
  EXPECT_GT(stats().offloaded, 0u);
}

TEST_F(OffloadRulesInPlace, TheErrorNamesTheTensorItsOperatorTheVersionsAndARemedy) {
  at::Tensor t = activation({32, 40});
  const at::Tensor y = Save({t});
  t.detach().add_(1);
  EXPECT_THAT(
      ErrorOf([&] { y.backward(); }),
      AllOf(HasSubstr("[Float [32, 40]]"), HasSubstr("which is output 0 of " + t.grad_fn()->name()),
            HasSubstr("is at version 1; expected version 0"), HasSubstr("set_detect_anomaly")));
}

// Two nodes save views of one tensor, and the first to run changes what it unpacked. The second
// must raise an error, wherever the bytes are.
TEST_F(OffloadRulesInPlace, ABackwardThatChangesWhatItUnpacksIsFoundOutByTheNextReader) {
  for (const bool offload : {false, true}) {
    SCOPED_TRACE(offload ? "with offload" : "without");
    at::Tensor t = activation({32, 32});
    const at::Tensor y =
        InScope(offload ? world_.session() : nullptr, carrier_, [&](at::Tensor& y) {
          y = Observe(y, {t}, &seen_);
          y = Probe(y, {t.view({-1})}, ChangeSaved);
        });
    t.reset();
    EXPECT_THAT(ErrorOf([&] { y.backward(); }), HasSubstr(kInPlaceMessage));
  }
  EXPECT_EQ(stats().fetched_on_demand, 1u);
}

// In a second backward, the changing node itself is the next reader.
TEST_F(OffloadRulesInPlace, ABackwardThatChangesWhatItUnpacksDoesNotRunTwice) {
  for (const bool offload : {false, true}) {
    for (const int64_t side : {8, 32}) {  // too small to offload; offloaded
      SCOPED_TRACE((offload ? "with offload, " : "without, ") + std::to_string(side));
      at::Tensor t = activation({side, side});
      const at::Tensor y = InScope(offload ? world_.session() : nullptr,
                                   [&] { return Probe(carrier_, {t}, ChangeSaved); });
      t.reset();
      y.backward({}, /*retain_graph=*/true);
      EXPECT_THAT(ErrorOf([&] { y.backward({}, /*retain_graph=*/true); }),
                  HasSubstr(kInPlaceMessage));
    }
  }
  EXPECT_EQ(stats().kept_small, 1u);
  EXPECT_EQ(stats().fetched_on_demand, 1u);
}

// The engine adds gradients in place to an unreferenced one, and a node may return its unpacked
// tensor as a gradient. The saved tensor must not change.
TEST_F(OffloadRules, ASavedTensorMayBeAGradientInEveryBackwardOfARetainedGraph) {
  OffloadOptions large_ones = SmallWindows();
  large_ones.min_offload_bytes = kMiB;
  const auto keeping = world_.NewSession(large_ones);
  for (const auto& session : {world_.session(), keeping}) {
    const at::Tensor x =
        at::ones({32, 32}, at::TensorOptions(world_.device())).requires_grad_(true);
    const at::Tensor hidden = at::mul(x, 1);
    const at::Tensor returned = InScope(session, [&] {
      return Probe(hidden, {activation({32, 32})},
                   [](const at::Tensor&, const UnpackSaved& unpack) { return unpack()[0]; });
    });
    const at::Tensor y = at::add(at::sum(at::mul(hidden, 2)), at::sum(returned));
    for (int i = 0; i < 3; ++i) {
      y.backward({}, /*retain_graph=*/true);
      EXPECT_TRUE(SameBytes(x.grad(), ActivationValues({32, 32}).add(2)));
      x.mutable_grad().reset();
    }
  }
  EXPECT_EQ(keeping->GetStats().kept_small, 1u);
  EXPECT_EQ(world_.session()->GetStats().offloaded, 1u);
}

// Like sharded training with a gathered parameter: raises no version.
void DropMemory(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
  storage->set_nbytes(0);
}

TEST_F(OffloadRules, AStorageThatIsResizedBeforeItsCopyIsNotRead) {
  const at::Tensor t = activation({16, 16});  // small enough to wait for a batch
  const auto session = world_.NewSession(SmallWindows(64 * kKiB));
  const at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
    y = Observe(y, {t}, &seen_);
    DropMemory(t);
  });
  EXPECT_EQ(session->GetStats().offloaded, 0u);
  EXPECT_EQ(session->GetStats().kept_copy_failed, 1u);
  EXPECT_THROW(y.backward(), c10::Error);
}

TEST_F(OffloadRules, AStorageThatIsResizedAfterItsCopyComesBackFromTheHost) {
  at::Tensor t = activation({32, 32});
  const at::Tensor y = Save({t});
  ASSERT_THAT(world_.Synchronize(), IsOk());
  DropMemory(t);
  y.backward();
  EXPECT_TRUE(SameBytes(seen_[0], ActivationValues({32, 32})));
}

}  // namespace
}  // namespace pinion::testing
