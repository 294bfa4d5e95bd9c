// Checks that every wait is necessary: without it, the race detector names two unordered accesses;
// with all waits it reports nothing.

#include "pinion/hooks/wait_sites.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_lane.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/tensor_departures.h"
#include "pinion/hooks/activations/tensor_returns.h"
#include "pinion/hooks/checkpoint/checkpoint.h"
#include "pinion/hooks/checkpoint/forward_state.h"
#include "pinion/hooks/weights/device_weights.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace wait_sites_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Property;

// Saves an activation, referenced by nothing else, in a scope.
at::Tensor SaveOne(OffloadWorld& world, ProbeBackward backward) {
  const at::Tensor activation = world.activation(16, 1);
  const OffloadScope scope(world.session());
  return Probe(world.carrier, {activation}, std::move(backward));
}

// Uses what it reads on a stream that has waited for nothing.
ProbeBackward UseOnAnotherStream(OffloadWorld& world) {
  return [stream = world.NewStream()](const at::Tensor& grad, const UnpackSaved& unpack) {
    const c10::StreamGuard guard(stream);
    return OffloadWorld::Use(grad, unpack);
  };
}

// Each scenario returns its evidence: reported races.
using Evidence = std::vector<std::string>;

Evidence SaveAndUse(const OffloadOptions& options, bool on_another_stream = false) {
  OffloadWorld world(options, CollectRaces());
  SaveOne(world, on_another_stream ? UseOnAnotherStream(world) : OffloadWorld::Use).backward();
  return world.machine().races();
}

Evidence RoundTrip() { return SaveAndUse(SmallWindows(1)); }

Evidence RoundTripWithBlockingCopies() {
  OffloadOptions options = SmallWindows();
  options.overlap = false;
  return SaveAndUse(options);
}

Evidence RoundTripToAnotherStream() {
  return SaveAndUse(SmallWindows(1), /*on_another_stream=*/true);
}

// The same with the tensor still on the device.
Evidence ReuseOnAnotherStream() {
  return SaveAndUse(SmallWindows(kMiB), /*on_another_stream=*/true);
}

// Dropped inside the window, while the D2H copy still reads the freed device memory.
Evidence DropWhileCopyingOut() {
  OffloadWorld world(SmallWindows(kMiB), CollectRaces());
  SaveOne(world, OffloadWorld::Use).reset();
  return world.machine().races();
}

// Saves enough small tensors to be gathered into one block.
at::Tensor SaveGroup(OffloadWorld& world, const ProbeBackward& backward) {
  constexpr int kTensors = 16;
  std::vector<at::Tensor> activations;
  for (int i = 0; i < kTensors; ++i) activations.push_back(world.activation(2, i));
  const OffloadScope scope(world.session());
  at::Tensor y = world.carrier;
  for (int i = 0; i < kTensors; ++i) {
    y = Probe(y, {std::exchange(activations[i], at::Tensor())}, backward);
  }
  return y;
}

// Gathered, copied, evicted, fetched in one piece, and read on `backward`'s stream.
Evidence GroupRoundTrip(OffloadWorld& world, const ProbeBackward& backward) {
  const at::Tensor group = SaveGroup(world, backward);
  EXPECT_EQ(world.stats().groups, 1u) << "the test's premise";
  const at::Tensor y = InScope(world.session(), [&] {
    return Probe(group, {world.activation(128)}, OffloadWorld::Use);  // fills the window
  });
  y.backward();
  EXPECT_GT(world.stats().fetched_on_demand, 0u) << "the test's premise";
  return world.machine().races();
}

Evidence GroupRoundTrip() {
  OffloadWorld world(SmallWindows(128 * kKiB), CollectRaces());
  return GroupRoundTrip(world, OffloadWorld::Use);
}

Evidence GroupRoundTripToAnotherStream() {
  OffloadWorld world(SmallWindows(128 * kKiB), CollectRaces());
  return GroupRoundTrip(world, UseOnAnotherStream(world));
}

// The gathered bytes are still on the device.
Evidence GroupReuseOnAnotherStream() {
  OffloadWorld world(SmallWindows(128 * kKiB), CollectRaces());
  SaveGroup(world, UseOnAnotherStream(world)).backward();
  EXPECT_EQ(world.stats().reused_on_device, 16u) << "the test's premise";
  return world.machine().races();
}

Evidence DropGroupWhileCopyingOut() {
  OffloadWorld world(SmallWindows(128 * kKiB), CollectRaces());
  SaveGroup(world, OffloadWorld::Use).reset();
  return world.machine().races();
}

// A weight whose cast is freed, read on streams that have waited for nothing.
Evidence CastOnOtherStreams(int readers) {
  OffloadWorld world(SmallWindows(1), CollectRaces());
  const at::Tensor weight = at::ones({64, 64}, world.carrier.options()).requires_grad_(true);
  std::vector<at::Tensor> casts;
  const auto use_on_another = [&]() -> ProbeBackward {
    return [&casts, stream = world.NewStream()](const at::Tensor& grad, const UnpackSaved& unpack) {
      const c10::StreamGuard guard(stream);
      casts.push_back(unpack()[0]);
      at::mul(casts.back(), 2);
      return grad;
    };
  };
  for (const bool known : {false, true}) {
    {
      const c10::NoGradGuard no_grad;
      weight.sub_(0.5);
    }
    const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
      const at::Tensor cast = weight.to(at::kBFloat16);
      for (int i = 0; i < readers; ++i)
        y = Probe(y, {cast}, known ? use_on_another() : ProbeBackward(OffloadWorld::Use));
    });
    y.backward();
  }
  EXPECT_EQ(world.stats().recast, 1u) << "the test's premise";
  return world.machine().races();
}

Evidence CastOnAnotherStream() { return CastOnOtherStreams(1); }
Evidence CastSharedByStreams() { return CastOnOtherStreams(2); }

// A segment that is recomputed on the stream of its forward.
Evidence CheckpointOnAnotherStream() {
  OffloadWorld world(SmallWindows(), CollectRaces());
  const at::Tensor y = checkpoint(
      [&world](const at::Tensor& x) {
        return Probe(x, {Activation(x, {128})}, UseOnAnotherStream(world));
      },
      world.carrier);
  y.backward();
  return world.machine().races();
}

// A streamed weight, used on its own stream, and on another, and dropped then.
Evidence FetchAndEvict(bool other_stream) {
  EmuWorld world(CollectRaces(), SmallWindows());
  torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::Linear(64, 64));
  constexpr uint64_t kOneLayer = 17 << 10;
  const auto weights = WeightOffloader::Attach(*net, world.device(), world.backend(),
                                               {.tier = SmallTier(), .window_bytes = kOneLayer})
                           .value();
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::ones({8, 64}, at::TensorOptions(world.device()));
  const auto run = [&](size_t layer) { net->ptr<torch::nn::LinearImpl>(layer)->forward(x); };
  run(0);
  if (other_stream) {
    const c10::Stream other = world.NewStream();
    const c10::StreamGuard guard(other);
    run(0);
  }
  run(1);
  return world.machine().races();
}
Evidence UseOnOneStream() { return FetchAndEvict(false); }
Evidence UseOnAnotherStream() { return FetchAndEvict(true); }

struct Scenario {
  const WaitSite* site;
  std::string variant;
  Evidence (*run)();
  // The two accesses that the evidence names when the wait is missing.
  std::string first;
  std::string second;
};

const std::vector<Scenario>& Scenarios() {
  static const auto* scenarios = new std::vector<Scenario>{
      {&pinion::internal::kCopyAfterCompute, "", RoundTrip, "copy D2H", "aten::"},
      {&pinion::internal::kCopyAfterCompute, "Group", GroupRoundTrip, "copy D2H",
       "aten::_foreach_copy_"},
      {&pinion::internal::kCopyAfterHostBuffer, "", RoundTripToAnotherStream, "copy D2H",
       "copy H2D"},
      {&pinion::internal::kCopyAfterHostBuffer, "Group", GroupRoundTripToAnotherStream, "copy D2H",
       "copy H2D"},
      {&kEvictAfterCopyOut, "", RoundTrip, "copy D2H", "the free"},
      {&kEvictAfterCopyOut, "Group", GroupRoundTrip, "copy D2H", "the free"},
      {&kUnpackAfterCopyIn, "", RoundTrip, "copy H2D", "aten::mul"},
      {&kUnpackAfterCopyIn, "Group", GroupRoundTrip, "copy H2D", "aten::mul"},
      {&kFreeAfterCopy, "", DropWhileCopyingOut, "copy D2H", "the free"},
      {&kFreeAfterCopy, "Group", DropGroupWhileCopyingOut, "copy D2H", "the free"},
      {&kUnpackOnOtherStream, "", ReuseOnAnotherStream, "aten::add", "aten::mul"},
      {&kUnpackOnOtherStream, "Group", GroupReuseOnAnotherStream, "aten::_foreach_copy_",
       "aten::mul"},
      {&kUnpackOnOtherStream, "Cast", CastOnAnotherStream, "aten::sub", "aten::copy_"},
      {&kUnpackOnOtherStream, "SharedCast", CastSharedByStreams, "aten::copy_", "aten::mul"},
      {&kBlockingCopyOut, "", RoundTripWithBlockingCopies, "copy D2H", "the free"},
      {&kComputedOnOtherStream, "", CheckpointOnAnotherStream, "aten::", "aten::mul"},
      {&kWeightAfterCopyIn, "", UseOnOneStream, "copy H2D", "aten::"},
      {&kWeightUsedOnOtherStream, "", UseOnAnotherStream, "aten::", "the free"},
  };
  return *scenarios;
}

class WaitSites : public ::testing::TestWithParam<Scenario> {};

TEST_P(WaitSites, NothingIsWrongWithTheWait) { EXPECT_THAT(GetParam().run(), IsEmpty()); }

TEST_P(WaitSites, WithoutItTheEvidenceNamesWhatIsUnordered) {
  const ScopedDisableWaitSite disable(*GetParam().site);
  EXPECT_THAT(GetParam().run(),
              Contains(AllOf(HasSubstr(GetParam().first), HasSubstr(GetParam().second))));
}

INSTANTIATE_TEST_SUITE_P(AllSites, WaitSites, ::testing::ValuesIn(Scenarios()),
                         [](const auto& info) {
                           return info.param.site->name() + info.param.variant;
                         });

// The engine's tests cover its own sites, some of which need a failing device.
TEST(WaitSitesTable, EverySiteOfTheHooksHasAScenario) {
  for (const std::string_view name : kHooksWaits) {
    EXPECT_THAT(Scenarios(), Contains(Field(&Scenario::site, Property(&WaitSite::name, name))));
  }
}

// Wrong bytes are a second proof: copies then take effect as late as possible.
class WaitSitesBytes : public ::testing::TestWithParam<const WaitSite*> {};

TEST_P(WaitSitesBytes, WithoutItTheBytesAreWrong) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "needs copies that are as late as possible";
  for (const bool disabled : {false, true}) {
    std::optional<ScopedDisableWaitSite> disable;
    if (disabled) disable.emplace(*GetParam());
    EmulatedOptions machine = MachineOptions(EffectSchedule::kLate);
    machine.detect_races = false;
    OffloadWorld world(SmallWindows(1), machine);
    bool same = false;
    SaveOne(world, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      same = SameBytes(at::mul(unpack()[0], 1), ActivationValues(KiB(16), 1));
      return grad;
    }).backward();
    EXPECT_EQ(same, !disabled);
  }
}

INSTANTIATE_TEST_SUITE_P(Sites, WaitSitesBytes,
                         ::testing::Values(&kEvictAfterCopyOut, &kUnpackAfterCopyIn),
                         [](const auto& info) { return std::string(info.param->name()); });

}  // namespace wait_sites_test
}  // namespace pinion::testing
