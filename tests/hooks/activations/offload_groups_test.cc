// Checks small tensors that share a host block and one copy in each direction. Each must behave
// like a tensor that is copied alone.

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kWindowBytes = 128 * kKiB;
constexpr uint64_t kGroupBytes = kWindowBytes / 4;  // of waiting tensors start a copy

class OffloadGroups : public OffloadFixture {
 protected:
  explicit OffloadGroups(const OffloadOptions& options = SmallWindows(kWindowBytes),
                         const EmulatedOptions& machine = MachineOptions())
      : OffloadFixture(options, machine) {}

  at::Tensor small(int first) { return activation({kFloats}, first); }
  static at::Tensor SmallValues(int first) { return ActivationValues({kFloats}, first); }

  // Saves by `extend` in a scope, and evicts what it saved.
  template <typename Extend>
  at::Tensor Evicted(const Extend& extend) {
    return PushOut(InScope(world_.session(), carrier_, extend));
  }
  // Saves `count` small tensors by a node each, and evicts them. Reads go to reads_.
  at::Tensor SaveMany(int count) {
    return Evicted([&](at::Tensor& y) {
      for (int i = 0; i < count; ++i) y = Observe(y, {small(i)}, &reads_[i]);
    });
  }
  // Evicts earlier tensors by saving one large tensor.
  at::Tensor PushOut(const at::Tensor& y) {
    const OffloadScope scope(world_.session());
    return Observe(y, {activation({kWindowBytes / 4})}, &pushed_);
  }
  void ExpectSeen(int count) {
    for (int i = 0; i < count; ++i) {
      ASSERT_EQ(reads_[i].size(), 1u) << i;
      EXPECT_TRUE(SameBytes(reads_[i][0], SmallValues(i))) << i;
    }
  }

  static constexpr int64_t kFloats = 512;
  static constexpr uint64_t kSmallBytes = 4 * kFloats;
  static constexpr int kPerGroup = kGroupBytes / kSmallBytes;

  std::vector<std::vector<at::Tensor>> reads_ = std::vector<std::vector<at::Tensor>>(4 * kPerGroup);
  std::vector<at::Tensor> pushed_;
};

// Peers make thousands of tiny copies (recsys-examples#48, vLLM#41474).
TEST_F(OffloadGroups, SmallTensorsShareOneCopyEachWay) {
  at::Tensor y = SaveMany(4 * kPerGroup);
  EXPECT_EQ(stats().groups, 4u);
  EXPECT_EQ(stats().grouped, 4u * kPerGroup);
  EXPECT_EQ(engine().d2h.submitted_pieces, 4u + 1);
  const uint64_t held = device_bytes();
  y.backward();
  EXPECT_EQ(engine().h2d.submitted_pieces, 4u) << "the large one is in the window";
  EXPECT_EQ(stats().prefetch_hits + stats().fetched_on_demand, 4u);
  EXPECT_EQ(stats().fetched_bytes, 4 * kGroupBytes);
  ExpectSeen(4 * kPerGroup);
  reads_.clear();
  pushed_.clear();
  y.reset();
  world_.ExpectNothingLeft();
  EXPECT_LT(device_bytes(), held);
}

// A group's copy reads the gathered bytes, so the tensors themselves are free for the next kernel.
TEST_F(OffloadGroups, AfterTheGatherTheTensorsGoBeforeTheirCopyIsDone) {
  const OffloadScope scope(world_.session());
  at::Tensor y = carrier_;
  const uint64_t before = device_bytes();
  for (int i = 0; i + 1 < kPerGroup; ++i) y = Observe(y, {small(i)}, &reads_[i]);
  EXPECT_EQ(stats().groups, 0u);
  EXPECT_GE(device_bytes() - before, (kPerGroup - 1) * kSmallBytes);
  y = Observe(y, {small(kPerGroup - 1)}, &reads_[kPerGroup - 1]);
  std::vector<at::Tensor> seen_next;
  y = Observe(y, {small(0)}, &seen_next);  // the last operator has returned
  EXPECT_EQ(stats().groups, 1u);
  EXPECT_EQ(stats().evicted_bytes, 0u) << "the gathered bytes are in the window";
  EXPECT_LE(device_bytes() - before, kGroupBytes + kSmallBytes + (kPerGroup + 1) * 512)
      << "and nothing else";
  y.backward();
  EXPECT_EQ(stats().reused_on_device, static_cast<uint64_t>(kPerGroup) + 1);
  EXPECT_EQ(stats().fetched_bytes, 0u);
  ExpectSeen(kPerGroup);
}

TEST_F(OffloadGroups, AFewSmallTensorsShareABlockAndTravelAsPieces) {
  at::Tensor y = SaveMany(3);
  EXPECT_EQ(stats().groups, 1u);
  EXPECT_LE(engine().d2h.submitted_pieces, 3u + 1);
  if (!TestsRunOnGpu()) {  // where adjacent tensors may form one piece
    EXPECT_EQ(engine().d2h.submitted_pieces, 3u + 1);
  }
  y.backward();
  EXPECT_EQ(engine().h2d.submitted_pieces, 1u);
  ExpectSeen(3);
}

// A large tensor does not force waiting small tensors into its copy.
TEST_F(OffloadGroups, SmallTensorsBetweenLargeOnesFindEachOther) {
  std::vector<at::Tensor> seen_large;
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    for (int i = 0; i < kPerGroup; ++i) {
      y = Observe(y, {small(i)}, &reads_[i]);
      y = Observe(y, {activation({8 * kKiB}, i)}, &seen_large);
    }
    y = PushOut(y);
  });
  EXPECT_EQ(stats().groups, 1u);
  EXPECT_EQ(stats().grouped, static_cast<uint64_t>(kPerGroup));
  y.backward();
  EXPECT_EQ(stats().fetched_on_demand, 0u) << stats().ToString();
  ExpectSeen(kPerGroup);
  EXPECT_TRUE(SameBytes(seen_large[0], ActivationValues({8 * kKiB}, 0)));
}

TEST_F(OffloadGroups, OddSizesTypesAndViewsComeBackAsTheyWere) {
  const std::vector<at::ScalarType> types = {at::kDouble, at::kHalf, at::kBFloat16,    at::kLong,
                                             at::kByte,   at::kBool, at::kComplexFloat};
  std::vector<at::Tensor> expected;
  const int count = 42;
  std::vector<uintptr_t> addresses;
  const at::Tensor y = Evicted([&](at::Tensor& y) {
    for (int i = 0; i < count; ++i) {
      const at::Tensor values = ActivationValues({33 + i, 31}, i).to(types[i % types.size()]);
      at::Tensor tensor = values.to(world_.device());
      expected.push_back(values);
      if (i % 3 == 1) {  // a strided view with an offset
        tensor = tensor.transpose(0, 1).slice(0, 2);
        expected.back() = values.transpose(0, 1).slice(0, 2);
      }
      addresses.push_back(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()));
      y = Observe(y, {tensor}, &reads_[i]);
    }
  });
  EXPECT_GE(stats().grouped, static_cast<uint64_t>(count * 3 / 4));
  y.backward();
  EXPECT_GT(stats().fetched_bytes, 0u);
  for (int i = 0; i < count; ++i) {
    SCOPED_TRACE(i);
    const at::Tensor& tensor = reads_[i].at(0);
    EXPECT_EQ(tensor.strides(), expected[i].strides());
    EXPECT_TRUE(SameBytes(tensor, expected[i]));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 512, addresses[i] % 512);
  }
}

TEST_F(OffloadGroups, AGroupIsFetchedOnceHoweverManyReadIt) {
  at::Tensor y = SaveMany(2 * kPerGroup);
  for (int backward = 1; backward <= 3; ++backward) {
    const uint64_t fetched_before = stats().fetched_bytes;
    y.backward({}, /*retain_graph=*/true);
    ExpectSeen(2 * kPerGroup);
    reads_.assign(reads_.size(), {});
    EXPECT_EQ(stats().fetched_bytes - fetched_before, 2 * kGroupBytes) << "backward " << backward;
  }
}

TEST_F(OffloadGroups, AGroupIsHeldUntilAllOfItIsReadAndNoLonger) {
  std::vector<uint64_t> held;
  const at::Tensor y = Evicted([&](at::Tensor& y) {
    for (int i = 0; i < kPerGroup; ++i) {
      y = Probe(y, {small(i)}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
        unpack();
        held.push_back(device_bytes());
        return grad;
      });
    }
  });
  y.backward();
  ASSERT_EQ(held.size(), static_cast<size_t>(kPerGroup));
  EXPECT_LE(held.back() + kGroupBytes, held.front());
  EXPECT_EQ(held[1], held[kPerGroup - 2]);
}

TEST_F(OffloadGroups, APartialBackwardLetsGoOfAGroupThatItReadInPart) {
  const at::Tensor late = NewCarrier();
  const at::Tensor y = Evicted([&](at::Tensor& y) {
    for (int i = 0; i < kPerGroup; ++i) {
      if (i == kPerGroup / 2) y = at::mul(y, late);
      y = Observe(y, {small(i)}, &reads_[i]);
    }
  });
  const uint64_t before = device_bytes();
  torch::autograd::grad({y}, {late}, {}, /*retain_graph=*/true);
  EXPECT_TRUE(reads_[0].empty());
  EXPECT_TRUE(SameBytes(reads_[kPerGroup - 1].at(0), SmallValues(kPerGroup - 1)));
  reads_.assign(reads_.size(), {});
  pushed_.clear();
  EXPECT_TRUE(Soon([&] { return device_bytes() == before; }));
  y.backward();
  ExpectSeen(kPerGroup);
}

TEST_F(OffloadGroups, AGraphThatIsDroppedWithoutBackwardReturnsEverything) {
  const uint64_t before = device_bytes();
  for (const bool flushed : {false, true}) {
    at::Tensor y = SaveMany(flushed ? 2 * kPerGroup : 3);
    y.reset();
    world_.ExpectNothingLeft();
    EXPECT_EQ(device_bytes(), before);
  }
}

TEST_F(OffloadGroups, TensorsThatGoBeforeTheirGroupLeavesAreNotCopied) {
  const OffloadScope scope(world_.session());
  at::Tensor y = Observe(carrier_, {small(1)}, &reads_[0]);
  for (int i = 0; i < kPerGroup; ++i) Observe(carrier_, {small(i)}, &reads_[1]);
  y = PushOut(y);
  EXPECT_EQ(stats().groups, 0u) << "the other graphs are gone";
  y.backward();
  EXPECT_TRUE(SameBytes(reads_[0][0], SmallValues(1)));
}

TEST_F(OffloadGroups, WhatIsReleasedWhileItWaitsIsInNoBatch) {
  std::vector<at::Tensor> seen_gone;
  const OffloadScope scope(world_.session());
  at::Tensor gone = carrier_;
  for (int i = 0; i < kPerGroup / 2; ++i) gone = Observe(gone, {small(i)}, &seen_gone);
  at::Tensor y = Observe(carrier_, {small(0)}, &reads_[0]);  // the earlier operators have returned
  gone.reset();
  for (int i = 1; i < kPerGroup; ++i) y = Observe(y, {small(i)}, &reads_[i]);
  EXPECT_EQ(engine().d2h.submitted_pieces, 0u) << "the last one's operator may still run";
  y = Observe(y, {small(kPerGroup)}, &reads_[kPerGroup]);
  EXPECT_EQ(stats().groups, 1u);
  EXPECT_EQ(stats().grouped, static_cast<uint64_t>(kPerGroup));
}

// Half of a group belongs to a dropped graph while the other half is still in use.
TEST_F(OffloadGroups, AGroupOutlivesAGraphThatHadPartOfIt) {
  at::Tensor dropped = carrier_;
  const at::Tensor kept = Evicted([&](at::Tensor& kept) {
    for (int i = 0; i < kPerGroup; ++i) {
      at::Tensor& y = i % 2 == 0 ? kept : dropped;
      y = Observe(y, {small(i)}, &reads_[i]);
    }
  });
  EXPECT_EQ(stats().groups, 1u);
  dropped.reset();
  kept.backward();
  for (int i = 0; i < kPerGroup; i += 2) {
    EXPECT_TRUE(SameBytes(reads_[i].at(0), SmallValues(i))) << i;
  }
}

TEST_F(OffloadGroups, ATensorThatTheUserHoldsStaysHisAndIsUsedAsItIs) {
  const at::Tensor held = small(0);
  const at::Tensor y = Evicted([&](at::Tensor& y) {
    y = Observe(y, {held}, &reads_[0]);
    for (int i = 1; i + 1 < kPerGroup; ++i) y = Observe(y, {small(i)}, &reads_[i]);
  });
  EXPECT_EQ(stats().evicted_not_freed, 1u);
  y.backward();
  EXPECT_TRUE(reads_[0].at(0).is_alias_of(held));
  ExpectSeen(kPerGroup - 1);
}

class OffloadGroupsInPlace : public OffloadGroups {
 protected:
  OffloadGroupsInPlace() : OffloadGroups(SmallWindows(kWindowBytes), RacesAllowed()) {}
};

TEST_F(OffloadGroupsInPlace, AChangeAfterSavingRaisesForThatTensorAlone) {
  at::Tensor held = small(0);
  std::vector<at::Tensor> seen_held;
  at::Tensor changed = carrier_;
  const at::Tensor y = Evicted([&](at::Tensor& y) {
    changed = Observe(changed, {held}, &seen_held);
    for (int i = 0; i < kPerGroup; ++i) y = Observe(y, {small(i)}, &reads_[i]);
  });
  EXPECT_EQ(stats().grouped, static_cast<uint64_t>(kPerGroup)) << "the changed one among them";
  held.detach().add_(1);
  EXPECT_THROW(changed.backward(), c10::Error);
  y.backward();
  ExpectSeen(kPerGroup);
}

TEST_F(OffloadGroupsInPlace, ABackwardThatChangesWhatItUnpacksSpoilsNoOtherTensorsOfTheGroup) {
  at::Tensor shared = small(3);
  std::vector<at::Tensor> seen_shared;
  const at::Tensor y = Evicted([&](at::Tensor& y) {
    y = Observe(y, {shared}, &seen_shared);
    for (int i = 0; i < kPerGroup; ++i) y = Observe(y, {small(i)}, &reads_[i]);
    y = Probe(y, {shared.view({-1})}, [](const at::Tensor& grad, const UnpackSaved& unpack) {
      const c10::NoGradGuard no_grad;
      unpack()[0].add_(1);
      return grad;
    });
    shared.reset();
  });
  EXPECT_THROW(y.backward(), c10::Error) << "the other reader of what was changed";
  ExpectSeen(kPerGroup);
}

TEST_F(OffloadGroups, EachStreamHasGroupsOfItsOwn) {
  const c10::Stream other = world_.NewStream();
  at::Tensor on_other;
  ASSERT_THAT(world_.Synchronize(), IsOk());
  const at::Tensor on_main = Evicted([&](at::Tensor& on_main) {
    std::optional<c10::StreamGuard> guard(other);
    const at::Tensor carrier = NewCarrier();
    on_other = carrier;
    for (int i = 0; i < kPerGroup; ++i) {
      guard.emplace(other);
      on_other = Observe(on_other, {Activation(carrier, {kFloats}, i)}, &reads_[i]);
      guard.reset();
      on_main = Observe(on_main, {small(kPerGroup + i)}, &reads_[kPerGroup + i]);
    }
  });
  EXPECT_GE(stats().groups, 2u);
  on_main.backward();
  {
    const c10::StreamGuard guard(other);
    on_other.backward();
  }
  ASSERT_THAT(world_.Synchronize(), IsOk());
  ExpectSeen(2 * kPerGroup);
}

TEST_F(OffloadGroups, TensorsOfAGroupMayBeReadOnOtherStreams) {
  for (const bool evicted : {true, false}) {
    SCOPED_TRACE(evicted ? "evicted" : "gathered on the device");
    const c10::Stream other = world_.NewStream();
    std::vector<at::Tensor> copies;
    at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
      for (int i = 0; i < kPerGroup; ++i) {
        y = Probe(y, {small(i)}, [&, i](const at::Tensor& grad, const UnpackSaved& unpack) {
          std::optional<c10::StreamGuard> guard;
          if (i % 2 == 0) guard.emplace(other);
          copies.push_back(unpack()[0].cpu());
          return grad;
        });
      }
    });
    if (evicted) y = PushOut(y);
    y.backward();
    for (int i = 0; i < kPerGroup; ++i) {
      EXPECT_TRUE(SameBytes(copies[kPerGroup - 1 - i], SmallValues(i))) << i;
    }
  }
}

// --- When something runs out ---

TEST_F(OffloadGroups, WithoutHostMemoryForTheGroupItsTensorsStayOnTheDevice) {
  OffloadOptions options = SmallWindows(kWindowBytes);
  options.allocator.segment_bytes = 16 * kKiB;
  options.allocator.max_locked_bytes = 16 * kKiB;
  world_.DropSession();  // all users of a host tier have the same options
  const auto session = world_.NewSession(options);
  const at::Tensor y = InScope(session, carrier_, [&](at::Tensor& y) {
    for (int i = 0; i < kPerGroup; ++i) y = Observe(y, {small(i)}, &reads_[i]);
  });
  const OffloadStats stats = session->GetStats();
  EXPECT_EQ(stats.kept_no_host_memory, static_cast<uint64_t>(kPerGroup));
  EXPECT_EQ(stats.offloaded, 0u);
  EXPECT_EQ(stats.offloaded_bytes, 0u);
  EXPECT_EQ(stats.packed, stats.offloaded + stats.shared + stats.kept());
  EXPECT_EQ(session->GetEngineStats(0).d2h.submitted_bytes, 0u);
  y.backward();
  ExpectSeen(kPerGroup);
}

// Gathering needs device memory for a moment. Without it, each tensor is copied separately to its
// place in the group's block.
TEST_F(OffloadGroups, WithoutDeviceMemoryToGatherTheTensorsAreCopiedOneByOne) {
  std::vector<at::Tensor> activations;
  for (int i = 0; i < kPerGroup; ++i) activations.push_back(small(i));
  at::Tensor y = carrier_;
  {
    const OffloadScope scope(world_.session());
    for (int i = 0; i < kPerGroup; ++i) {
      if (i + 1 == kPerGroup) {
        ASSERT_THAT(world_.Synchronize(), IsOk());
        ASSERT_THAT(world_.machine().SetMemoryLimit(0, device_bytes() + 4 * kKiB), IsOk());
      }
      y = Observe(y, {activations[i]}, &reads_[i]);
    }
    activations.clear();
  }
  EXPECT_EQ(stats().groups, 1u);
  EXPECT_EQ(engine().d2h.submitted_pieces, static_cast<uint64_t>(kPerGroup));
  ASSERT_THAT(world_.machine().SetMemoryLimit(0, device_bytes() + 4 * kMiB), IsOk());
  y = PushOut(y);
  EXPECT_EQ(stats().evicted_bytes, kGroupBytes);
  y.backward();
  EXPECT_EQ(engine().h2d.submitted_pieces, 1u);
  ExpectSeen(kPerGroup);
}

TEST_F(OffloadGroups, AStreamThatBeginsToCaptureKeepsWhatWaits) {
  at::Tensor y = carrier_;
  const StreamHandle stream = world_.machine().default_stream(0);
  {
    const OffloadScope scope(world_.session());
    for (int i = 0; i + 1 < kPerGroup; ++i) y = Observe(y, {small(i)}, &reads_[i]);
    ASSERT_THAT(world_.machine().SetCapturing(stream, true), IsOk());
  }
  ASSERT_THAT(world_.machine().SetCapturing(stream, false), IsOk());
  EXPECT_EQ(stats().kept_capturing, static_cast<uint64_t>(kPerGroup - 1));
  EXPECT_EQ(stats().groups, 0u);
  y.backward();
  ExpectSeen(kPerGroup - 1);
}

class OffloadGroupsOnDemand : public OffloadGroups {
 protected:
  // The prefetch window holds at most one group.
  OffloadGroupsOnDemand() : OffloadGroups(Windows(kWindowBytes, 1)) {}
};

TEST_F(OffloadGroupsOnDemand, OneFetchServesTheWholeGroup) {
  at::Tensor y = SaveMany(kPerGroup);
  torch::autograd::grad({y}, {carrier_}, {}, /*retain_graph=*/true);
  EXPECT_EQ(stats().fetched_on_demand, 1u) << stats().ToString();
  EXPECT_EQ(engine().h2d.submitted_pieces, 1u);
  ExpectSeen(kPerGroup);
}

// --- What it is for ---

// A chain of operators that save small tensors.
struct SmallTensorsRun {
  std::vector<at::Tensor> seen;
  EngineStats engine;
  OffloadStats stats;
  uint64_t device_calls = 0;  // that cost host time
  double step_ms = 0;
};

SmallTensorsRun RunSmallTensors(bool share) {
  constexpr int kTensors = 400;
  OffloadOptions options = SmallWindows(kMiB);
  if (!share) options.link->h2d.piece_us = 0;  // so that sharing gains nothing
  SmallTensorsRun run;
  EmuWorld world(MachineOptions(), options);
  const at::Tensor carrier = NewCarrier(world);
  for (const bool warm : {false, true}) {  // the first step pins host memory
    std::vector<std::vector<at::Tensor>> seen(kTensors);
    std::vector<at::Tensor> activations;
    for (int i = 0; i < kTensors; ++i) {
      activations.push_back(Activation(carrier, {1024 * (1 + i % 4)}, i));  // 4 to 16 KiB
    }
    EXPECT_TRUE(world.Synchronize().ok());
    const double begin_ms = world.machine().now_ms();
    const uint64_t calls_before = world.machine().calls(DeviceCall::kAny);
    const at::Tensor y = InScope(world.session(), carrier, [&](at::Tensor& y) {
      for (int i = 0; i < kTensors; ++i) {
        y = Observe(y, {std::exchange(activations[i], at::Tensor())}, &seen[i]);
      }
    });
    y.backward();
    EXPECT_TRUE(world.Synchronize().ok());
    run.step_ms = world.machine().now_ms() - begin_ms;
    run.device_calls = world.machine().calls(DeviceCall::kAny) - calls_before;
    if (!warm) continue;
    // Detached, because their history would keep the carrier.
    for (const auto& tensors : seen) run.seen.push_back(tensors.at(0).detach().cpu());
  }
  run.stats = world.QuietStats();
  run.engine = world.session()->GetEngineStats(0);
  return run;
}

TEST(OffloadManySmallTensors, ShareSoManyCopiesThatTheStepIsFaster) {
  const SmallTensorsRun alone = RunSmallTensors(/*share=*/false);
  const SmallTensorsRun shared = RunSmallTensors(/*share=*/true);
  ExpectSame(alone.seen, shared.seen);
  EXPECT_EQ(alone.stats.groups, 0u);
  EXPECT_EQ(shared.stats.grouped, shared.stats.offloaded);
  EXPECT_EQ(alone.stats.offloaded_bytes, shared.stats.offloaded_bytes);
  EXPECT_LE(10 * shared.engine.d2h.submitted_pieces, alone.engine.d2h.submitted_pieces);
  EXPECT_LE(10 * shared.engine.h2d.submitted_pieces, alone.engine.h2d.submitted_pieces);
  EXPECT_LE(5 * shared.engine.h2d.submitted_transfers, alone.engine.h2d.submitted_transfers);
  EXPECT_LT(shared.device_calls, 0.8 * alone.device_calls);
  EXPECT_LT(shared.step_ms, 0.9 * alone.step_ms);
  RecordProperty("alone_calls", static_cast<int>(alone.device_calls));
  RecordProperty("shared_calls", static_cast<int>(shared.device_calls));
  RecordProperty("alone_us", static_cast<int>(1e3 * alone.step_ms));
  RecordProperty("shared_us", static_cast<int>(1e3 * shared.step_ms));
}

}  // namespace
}  // namespace pinion::testing
