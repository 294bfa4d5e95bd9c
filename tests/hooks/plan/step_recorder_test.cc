// Checks the contents of a step's record: objects, uses, intervals, bytes; also during offload.

#include "pinion/hooks/plan/step_recorder.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/sum.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/allocation_bytes.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/plan/device_recording.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Lt;
using ::testing::SizeIs;

constexpr int64_t kTensorBytes = 64 * kKiB;  // large enough for a copy of its own
constexpr uint64_t kThreeTensors = 3 * kTensorBytes;

at::Tensor UseSaved(const at::Tensor& grad, const UnpackSaved& unpack) {
  for (const at::Tensor& saved : unpack()) at::mul(saved, 2);
  return grad;
}

// Frees the saved tensor, and then allocates three times its bytes for a moment.
at::Tensor TakeMore(const at::Tensor& grad, const UnpackSaved& unpack) {
  unpack();
  at::ones({3 * kTensorBytes / 4}, grad.options());
  return grad;
}

// A custom function, which reads its input.
struct OwnFormula : torch::autograd::Function<OwnFormula> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return at::mul(x, 2);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {at::mul(gradients[0], context->get_saved_variables()[0])};
  }
};

class StepRecorderTest : public ::testing::Test {
 protected:
  // The copy window holds one tensor.
  explicit StepRecorderTest(const EmulatedOptions& machine = MachineOptions())
      : world_(machine, SmallWindows(kTensorBytes)) {}

  std::shared_ptr<StepRecorder> NewRecorder() {
    return StepRecorder::Create(world_.backend()).value();
  }
  // Makes a recorder that gets its devices from `device`.
  void RecordOn(decltype(DeviceBackend::device) device) {
    DeviceBackend backend = world_.backend();
    backend.device = std::move(device);
    recorder_ = StepRecorder::Create(backend).value();
  }
  std::shared_ptr<ForwardingDevice> RecordOnForwardingDevice() {
    auto device = std::make_shared<ForwardingDevice>(world_.machine().device(0));
    RecordOn([device](int) { return absl::StatusOr<std::shared_ptr<Device>>(device); });
    return device;
  }

  // Runs `forward` in a record scope.
  template <typename Forward>
  auto RecordForward(const Forward& forward) {
    const RecordScope record(recorder_);
    return forward();
  }
  // Returns the record of `forward` and its backward; with a session, `forward` is in its scope.
  StepTrace RecordStep(const std::function<at::Tensor()>& forward,
                       const std::shared_ptr<OffloadSession>& session = nullptr) {
    at::Tensor y;
    {
      std::optional<OffloadScope> offload;
      if (session != nullptr) offload.emplace(session);
      y = RecordForward(forward);
    }
    y.backward();
    return Finish();
  }
  struct TwoRecords {
    StepTrace all_stay;
    StepTrace some_leave;
  };
  // Records `forward` without a session and with one that evicts.
  TwoRecords RecordWithoutAndWithOffload(const std::function<at::Tensor()>& forward) {
    TwoRecords records = {RecordStep(forward), RecordStep(forward, world_.session())};
    EXPECT_GT(world_.session()->GetStats().evicted_bytes, 0u);
    return records;
  }
  StepTrace Finish() {
    absl::StatusOr<std::map<int, StepTrace>> steps = recorder_->Finish();
    EXPECT_THAT(steps, IsOk());
    if (!steps.ok()) return StepTrace();
    EXPECT_THAT(*steps, SizeIs(1));
    StepTrace step = (*steps)[world_.device().index()];
    EXPECT_THAT(step.Validate(), IsOk());
    return step;
  }

  at::Tensor Ones() { return at::ones({1}, at::TensorOptions(world_.device())); }
  // Returns a leaf as large as `tensors` activations.
  at::Tensor Leaf(int tensors = 1) {
    return at::ones({tensors * kTensorBytes / 4}, at::TensorOptions(world_.device()));
  }
  at::Tensor activation(int64_t bytes = kTensorBytes) { return Activation(carrier_, {bytes / 4}); }
  // Returns a chain of nodes that save one tensor each.
  at::Tensor Chain(int nodes) { return Chain(nodes, carrier_); }
  at::Tensor Chain(int nodes, at::Tensor y) {
    for (int i = 0; i < nodes; ++i) y = Probe(y, {activation()}, UseSaved);
    return y;
  }

  EmuWorld world_;
  std::shared_ptr<StepRecorder> recorder_ = NewRecorder();
  at::Tensor carrier_ = Ones().requires_grad_(true);
};

class StepRecorderOnTwoDevices : public StepRecorderTest {
 protected:
  StepRecorderOnTwoDevices() : StepRecorderTest(TwoDevices()) {}
  static EmulatedOptions TwoDevices() {
    EmulatedOptions options = MachineOptions();
    options.device_count = 2;
    return options;
  }
};

// Every copy stalls for 10 ms of virtual time.
class StepRecorderWithSlowCopies : public StepRecorderTest {
 protected:
  StepRecorderWithSlowCopies() : StepRecorderTest(SlowCopies(/*stall_ms=*/10)) {}

  // Records a step of six tensors that takes more than `least_ms`, none of which is compute.
  StepTrace RecordSlowStep(const std::shared_ptr<OffloadSession>& session, double least_ms) {
    const at::Tensor x = activation();
    const double before_ms = world_.machine().now_ms();
    at::Tensor y = RecordForward([&] {
      const OffloadScope scope(session);
      at::Tensor made = carrier_;
      for (int i = 0; i < 6; ++i) made = Probe(made, {at::mul(x, 2)}, UseSaved);
      return made;
    });
    y.backward();
    y.reset();
    EXPECT_THAT(world_.Synchronize(), IsOk());  // CUDA's waits do not move virtual time
    StepTrace step = Finish();
    EXPECT_GT(world_.machine().now_ms() - before_ms, least_ms);
    EXPECT_LT(step.compute_us(), 10e3);
    return step;
  }
};

template <typename Of, typename Field>
auto FieldOf(const std::vector<Of>& all, Field Of::*field) {
  std::vector<Field> values;
  for (const Of& one : all) values.push_back(one.*field);
  return values;
}

std::vector<uint64_t> Sizes(const StepTrace& step) {
  return FieldOf(step.objects, &StepObject::size_bytes);
}
std::vector<bool> Frees(const StepTrace& step) { return FieldOf(step.objects, &StepObject::frees); }
std::vector<uint64_t> OtherBytes(const StepTrace& step) {
  return FieldOf(step.intervals, &StepInterval::other_bytes);
}

void ExpectSameUses(const StepTrace& a, const StepTrace& b) {
  EXPECT_EQ(a.accesses, b.accesses);
  EXPECT_EQ(Sizes(a), Sizes(b));
  EXPECT_EQ(FieldOf(a.objects, &StepObject::signature), FieldOf(b.objects, &StepObject::signature));
  EXPECT_EQ(Frees(a), Frees(b));
}

// --- What a record says ---

TEST_F(StepRecorderTest, AForwardSavesInOrderAndItsBackwardReadsInReverse) {
  const StepTrace step = RecordStep([&] { return Chain(3); });
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 2, 2, 1, 0));
  EXPECT_THAT(Sizes(step), ElementsAre(kTensorBytes, kTensorBytes, kTensorBytes));
  EXPECT_THAT(Frees(step), ElementsAre(true, true, true));
  EXPECT_THAT(FieldOf(step.objects, &StepObject::recast_us), Each(std::nullopt));
  EXPECT_FALSE(step.timed_by_host);
  // Each interval before a save makes a tensor, and each behind a read computes with it.
  for (const size_t i : {0, 1, 2, 4, 5, 6}) EXPECT_GT(step.intervals[i].compute_us, 0) << i;
}

TEST_F(StepRecorderTest, StepsThatDoTheSameHaveTheSameOrdinals) {
  const TestNet net(world_.device(), at::kFloat);
  std::optional<StepTrace> first;
  for (int i = 0; i < 3; ++i) {
    SeedGenerators();
    at::Tensor loss = RecordForward([&] { return net.Loss(); });
    loss.backward();
    TakeGradients(net, loss);
    loss.reset();
    const StepTrace step = Finish();
    EXPECT_GT(step.objects.size(), 10u);
    if (!first.has_value()) first = step;
    ExpectSameUses(step, *first);
  }
}

TEST_F(StepRecorderTest, WhatIsOfAnotherSizeTypeOrPlaceHasAnotherSignature) {
  RecordForward([&] {
    const at::Tensor floats = activation();
    Chain(1,
          Probe(carrier_, {floats, activation(), activation(2 * kTensorBytes), floats.to(at::kInt)},
                UseSaved));
  });
  const StepTrace step = Finish();
  ASSERT_THAT(step.objects, SizeIs(5));
  EXPECT_NE(step.objects[0].signature, step.objects[4].signature);
  EXPECT_EQ(step.objects[0].signature, step.objects[1].signature);
  EXPECT_NE(step.objects[0].signature, step.objects[2].signature);
  EXPECT_NE(step.objects[0].signature, step.objects[3].signature);
}

TEST_F(StepRecorderTest, ViewsAreUsesOfOneObject) {
  const StepTrace step = RecordStep([&] {
    const at::Tensor base = activation();
    return Probe(carrier_, {base, base.view({-1, 16}).transpose(0, 1), base.slice(0, 5, 9000)},
                 UseSaved);
  });
  EXPECT_THAT(Sizes(step), ElementsAre(kTensorBytes));
  EXPECT_THAT(step.accesses, ElementsAre(0, 0, 0, 0, 0, 0));
  EXPECT_THAT(Frees(step), ElementsAre(true));
}

// Returns quarter `n` of a tensor of 4 * kTensorBytes.
at::Tensor Quarter(const at::Tensor& base, int64_t n) {
  return base.slice(0, n * kTensorBytes / 4, (n + 1) * kTensorBytes / 4);
}

TEST_F(StepRecorderTest, SmallViewsOfOneStorageAreObjectsOfTheirOwn) {
  const StepTrace step = RecordStep([&] {
    const at::Tensor base = activation(4 * kTensorBytes);
    return Probe(Probe(carrier_, {Quarter(base, 0)}, UseSaved), {Quarter(base, 2)}, UseSaved);
  });
  EXPECT_THAT(Sizes(step), ElementsAre(4 * kTensorBytes, kTensorBytes))
      << "the one that is needed longest has what nobody saved of the storage, too";
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(Frees(step), ElementsAre(true, true));
  EXPECT_EQ(step.intervals[2].other_bytes, step.intervals[4].other_bytes);
}

TEST_F(StepRecorderTest, PartsThatGoTogetherCountAsTheirStorage) {
  const StepTrace step = RecordStep([&] {
    const at::Tensor base = activation(4 * kTensorBytes);
    return Probe(carrier_, {Quarter(base, 0), Quarter(base, 1), Quarter(base, 3)}, UseSaved);
  });
  EXPECT_THAT(Sizes(step), ElementsAre(2 * kTensorBytes, kTensorBytes, kTensorBytes));
}

TEST_F(StepRecorderTest, AStorageCountsWholeUntilItsLastPartIsSaved) {
  const StepTrace step = RecordStep([&] {
    const at::Tensor base = activation(4 * kTensorBytes);
    const at::Tensor dropped = Probe(carrier_, {Quarter(base, 0)}, UseSaved);
    return Probe(carrier_, {base}, UseSaved);
  });
  ASSERT_THAT(Sizes(step), ElementsAre(kTensorBytes, 4 * kTensorBytes));
  ASSERT_THAT(Frees(step), ElementsAre(true, true));
  EXPECT_GE(step.intervals[0].other_bytes, 3 * kTensorBytes) << "the whole is there already";
  EXPECT_LT(step.intervals[1].other_bytes, kTensorBytes);
}

TEST_F(StepRecorderTest, AnObjectThatIsSavedAgainIsHeldUntilThen) {
  const StepTrace step = RecordStep([&] {
    const at::Tensor held = activation();
    return Probe(Chain(1, Probe(carrier_, {held}, UseSaved)), {held}, UseSaved);
  });
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 0, 0, 1, 0));
  EXPECT_THAT(FieldOf(step.objects, &StepObject::saved_until), ElementsAre(2, 0));
}

TEST_F(StepRecorderTest, TheProgramHoldsAnObjectUntilItLetsGoOfIt) {
  const StepTrace step = RecordStep([&] {
    at::Tensor held = activation();
    const at::Tensor y = Chain(1, Probe(carrier_, {held}, UseSaved));
    held.reset();
    return Chain(1, y);
  });
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 2, 2, 1, 0));
  EXPECT_EQ(step.objects[0].held_until, 2u);
  EXPECT_EQ(step.objects[1].held_until, 0u) << "only its operator has had it";
}

TEST_F(StepRecorderTest, WhatAPackerHoldsIsNotHeldByTheProgram) {
  // The window holds one of three tensors; the program references one of the two evicted ones.
  const StepTrace step = RecordStep(
      [&] {
        const at::Tensor y = Chain(1);
        at::Tensor held = activation();
        const at::Tensor z = Chain(2, Probe(y, {held}, UseSaved));
        held.reset();
        return Chain(1, z);
      },
      world_.session());
  EXPECT_GT(world_.session()->GetStats().evicted_bytes, 0u);
  EXPECT_THAT(FieldOf(step.objects, &StepObject::held_until), ElementsAre(0, 3, 0, 0, 0))
      << "it has gone in the fourth interval";
}

TEST_F(StepRecorderTest, WhatTakesThePlaceOfAnObjectThatIsAwayTakesRoomBesideOneThatStays) {
  const auto [all_stay, some_leave] = RecordWithoutAndWithOffload([&] {
    at::Tensor held = activation();
    const at::Tensor y = Chain(3, Probe(carrier_, {held}, UseSaved));
    at::Tensor between = Leaf();
    held.reset();  // an offloaded tensor is freed before the next is made
    const at::Tensor made = activation();
    between.reset();
    return Probe(y, {made}, UseSaved);
  });
  EXPECT_GE(all_stay.intervals[4].transient_bytes, uint64_t{kTensorBytes});
  EXPECT_EQ(some_leave.intervals[4].transient_bytes, all_stay.intervals[4].transient_bytes);
}

TEST_F(StepRecorderTest, WhatIsLetGoOfBehindTheStretchsPeakIsHeldUntilThen) {
  const auto [all_stay, some_leave] = RecordWithoutAndWithOffload([&] {
    std::vector<at::Tensor> held = {activation(), activation()};
    at::Tensor y = carrier_;
    for (const at::Tensor& tensor : held) y = Probe(y, {tensor}, UseSaved);
    y = Chain(3, y);
    Leaf(3);
    Leaf(1);
    held.clear();  // if offloaded, as many bytes were freed twice before
    return Chain(1, y);
  });
  for (const StepTrace* step : {&all_stay, &some_leave}) {
    EXPECT_EQ(step->objects[0].held_until, 5u);
    EXPECT_EQ(step->objects[1].held_until, 5u);
  }
  EXPECT_GE(all_stay.intervals[5].transient_bytes, uint64_t{kTensorBytes});
  EXPECT_EQ(some_leave.intervals[5].transient_bytes, all_stay.intervals[5].transient_bytes);
}

// The program releases two saved tensors, with an allocation in between and a large one at the end.
TEST_F(StepRecorderTest, WhatGoesWithoutBeingNeededEndsNobodysHold) {
  const auto [all_stay, some_leave] = RecordWithoutAndWithOffload([&] {
    at::Tensor needed = activation(), not_needed = activation();
    at::Tensor y = Probe(carrier_, {needed}, UseSaved);
    Probe(y, {not_needed}, UseSaved);
    y = Chain(3, y);
    needed.reset();
    const at::Tensor between = Leaf();
    not_needed.reset();
    Leaf(3);
    return Chain(1, y);
  });
  EXPECT_GE(all_stay.intervals[5].transient_bytes, uint64_t{2 * kTensorBytes});
  EXPECT_EQ(some_leave.intervals[5].transient_bytes, all_stay.intervals[5].transient_bytes);
}

// Packs copies in host memory, of which none is kept on the device.
class AwayPacker final : public SavedTensorPacker {
 public:
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    class Away final : public SavedTensor {
     public:
      explicit Away(const at::Tensor& tensor) : device_(tensor.device()), host_(tensor.cpu()) {}
      at::Tensor Unpack() override { return host_.to(device_); }
      const void* MemoryOwner() const override { return nullptr; }

     private:
      const at::Device device_;
      const at::Tensor host_;
    };
    return std::make_unique<Away>(tensor.detach());
  }
};

TEST_F(StepRecorderTest, ACopyThatItsReaderLetsGoOfCountsAsLongAsItIsNeeded) {
  const auto record = [&] {
    return RecordStep([&] { return Probe(carrier_, {activation()}, TakeMore); });
  };
  record();  // which makes a gradient
  const StepTrace stays = record();
  const SavedTensorScope scope(std::make_shared<AwayPacker>());
  const StepTrace leaves = record();
  EXPECT_GE(stays.intervals[2].transient_bytes, uint64_t{3 * kTensorBytes});
  EXPECT_EQ(leaves.intervals[2].peak_other_bytes(), stays.intervals[2].peak_other_bytes());
}

TEST_F(StepRecorderTest, WhatAReaderWasGivenGoesWithItsHandleAsWhatHasStayedDoes) {
  const auto forward = [&] { return Chain(3, Probe(carrier_, {activation()}, TakeMore)); };
  OffloadOptions options = SmallWindows(OffloadOptions::kAutoWindow);
  options.memory_target_bytes = 1;  // offloads everything
  const auto session = OffloadSession::Create(options, world_.backend()).value();
  const StepTrace stays = RecordStep(forward);
  const StepTrace leaves = RecordStep(forward, session);
  EXPECT_GT(session->GetStats().fetched_bytes, 0u);
  ASSERT_THAT(leaves.accesses, ElementsAre(0, 1, 2, 3, 3, 2, 1, 0));
  EXPECT_GE(stays.intervals[8].transient_bytes, uint64_t{3 * kTensorBytes});
  // The first of the steps makes a gradient.
  EXPECT_NEAR(leaves.intervals[8].peak_other_bytes(), stays.intervals[8].peak_other_bytes(),
              AllocationBytes(sizeof(float)));
}

TEST_F(StepRecorderTest, AnotherVersionIsAnotherObject) {
  RecordForward([&] {
    at::Tensor x = activation();
    const at::Tensor before = Probe(carrier_, {x}, UseSaved);
    x.add_(1);
    const at::Tensor after = Probe(carrier_, {x}, UseSaved);
  });
  EXPECT_THAT(Finish().accesses, ElementsAre(0, 1));
}

// Packers treat a part as another object if any byte of it is outside the first part. On the device
// each part counts in multiples of the allocation size.
TEST_F(StepRecorderTest, PartsThatOverlapAreObjectsEachAndCountAsAllocations) {
  constexpr int64_t kPartBytes = 1200;
  const at::Tensor whole = activation(16 << 10);
  const auto part = [&whole](int64_t begin_bytes) {
    return whole.narrow(0, begin_bytes / 4, kPartBytes / 4);
  };
  RecordForward([&] {
    at::Tensor y = carrier_;
    for (const int64_t begin_bytes : {0, 200, 200}) y = Probe(y, {part(begin_bytes)}, UseSaved);
  });
  const StepTrace step = Finish();
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 1));
  const uint64_t part_bytes = AllocationBytes(kPartBytes);
  EXPECT_THAT(Sizes(step), ElementsAre((16 << 10) - part_bytes, part_bytes));
}

TEST_F(StepRecorderTest, ParametersAndWhatIsSmallAreOtherBytes) {
  const at::Tensor parameter = Leaf().requires_grad_(true);
  RecordForward([&] {
    Probe(carrier_, {parameter, activation(512), at::ones({kTensorBytes})}, UseSaved);
    Chain(1);
  });
  const StepTrace step = Finish();
  EXPECT_THAT(Sizes(step), ElementsAre(kTensorBytes));
  EXPECT_GE(step.intervals[0].other_bytes, static_cast<uint64_t>(kTensorBytes));
}

TEST_F(StepRecorderTest, WhatSomebodyElseHoldsFreesNothing) {
  const at::Tensor input = Leaf();
  at::Tensor kept;
  at::Tensor y = RecordForward([&] {
    kept = activation();
    const at::Tensor saved = Probe(Probe(carrier_, {input}, UseSaved), {kept}, UseSaved);
    // A dropout's mask is a leaf like an input, but nothing references it.
    const at::Tensor dropped = std::get<0>(at::native_dropout(activation(), 0.5, true));
    return at::add(saved, dropped.sum());
  });
  y.backward();
  const StepTrace step = Finish();
  EXPECT_THAT(Sizes(step), ElementsAre(kTensorBytes, kTensorBytes, kTensorBytes / 4));
  EXPECT_THAT(Frees(step), ElementsAre(false, false, true));
  EXPECT_EQ(step.intervals.back().other_bytes, world_.device_bytes());
  // They are among the other bytes from the first use on.
  EXPECT_THAT(OtherBytes(step), Each(Ge(2u * kTensorBytes)));
}

TEST_F(StepRecorderTest, WhereObjectsThatFreeNothingOverlapTheBytesCountOnce) {
  const at::Tensor held = Leaf();
  const uint64_t before = world_.device_bytes();
  at::Tensor y, z;
  RecordForward([&] {
    y = Probe(carrier_, {held}, UseSaved);
    held.add_(1);
    z = Probe(carrier_, {held}, UseSaved);
  });
  const StepTrace step = Finish();
  EXPECT_THAT(Sizes(step), ElementsAre(kTensorBytes, kTensorBytes));
  EXPECT_THAT(Frees(step), ElementsAre(false, false));
  for (const uint64_t bytes : OtherBytes(step)) EXPECT_NEAR(bytes, before, 2 * kKiB);
}

TEST_F(StepRecorderTest, OtherBytesAreAllThatIsLiveBesideObjects) {
  const at::Tensor held = Leaf(3);
  const uint64_t before = world_.device_bytes();
  at::Tensor y = RecordForward([&] { return Chain(2); });
  const uint64_t outputs = world_.device_bytes() - before - 2 * kTensorBytes;
  y.backward();
  const StepTrace step = Finish();
  // The output of one probe is live from the second save on. Backward allocates as little.
  EXPECT_EQ(step.intervals[0].other_bytes, before);
  EXPECT_EQ(step.intervals[1].other_bytes, before + outputs);
  for (const size_t i : {2, 3, 4}) {
    EXPECT_NEAR(step.intervals[i].other_bytes, before + outputs, 2 * kKiB) << i;
  }
}

TEST_F(StepRecorderTest, WhatAThreadFreesOfWhichNobodyIsToldIsNotThereEither) {
  std::vector<std::vector<uint64_t>> other_bytes;
  for (const bool elsewhere : {false, true}) {
    other_bytes.push_back(OtherBytes(RecordStep([&] {
      at::Tensor dropped = Chain(1);
      const auto drop = [&dropped] { dropped.reset(); };
      elsewhere ? std::thread(drop).join() : drop();
      return Chain(2);
    })));
    carrier_.mutable_grad().reset();
  }
  EXPECT_EQ(other_bytes[0], other_bytes[1]);
}

TEST_F(StepRecorderTest, WhatOneNodeSavesAndWhatOneNodeReadsIsOneOperators) {
  const StepTrace step = RecordStep([&] {
    return Chain(1, Probe(carrier_, {activation(), activation()}, UseSaved));
  });
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 2, 2, 0, 1));
  EXPECT_THAT(step.operators, ElementsAre(0, 0, 1, 2, 3, 3));
}

TEST_F(StepRecorderTest, WhatIsTakenAndGivenBackInAForwardIsTransient) {
  RecordForward([&] {
    const at::Tensor y = Chain(1);
    activation(3 * kTensorBytes);
    Chain(1, y);
  });
  EXPECT_THAT(FieldOf(Finish().intervals, &StepInterval::transient_bytes),
              ElementsAre(Lt(kThreeTensors), Ge(kThreeTensors), Lt(kThreeTensors)));
}

TEST_F(StepRecorderTest, WhatIsMadeBeforeSomethingGoesAndSavedAfterwardsIsAnObjectThroughout) {
  const StepTrace step = RecordStep([&] {
    at::Tensor unused = Chain(1);
    const at::Tensor made = activation(2 * kTensorBytes);
    unused.reset();
    return Probe(carrier_, {made}, UseSaved);
  });
  ASSERT_THAT(step.accesses, ElementsAre(0, 1, 1));
  ASSERT_THAT(Frees(step), ElementsAre(true, true));
  // What it is made of.
  EXPECT_NEAR(step.intervals[1].transient_bytes, 2 * kTensorBytes, 2 * kKiB);
}

TEST_F(StepRecorderTest, WhatIsTakenAndGivenBackInABackwardIsTransient) {
  const StepTrace step = RecordStep([&] { return Probe(Chain(1), {activation()}, TakeMore); });
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 1, 0));
  EXPECT_LT(step.intervals[2].transient_bytes, kThreeTensors);
  EXPECT_GE(step.intervals[3].transient_bytes, kThreeTensors);
  EXPECT_LT(step.intervals[4].transient_bytes, kThreeTensors);
}

TEST_F(StepRecorderTest, WhatAnOperatorHasLetGoOfBeforeTheStretchsPeakDoesNotAddToIt) {
  const uint64_t before = world_.device_bytes();
  const StepTrace step = RecordStep([&] { return Chain(1, Probe(carrier_, {}, TakeMore)); });
  ASSERT_THAT(step.accesses, ElementsAre(0, 0));
  // The node that has read the tensor makes one as large, and both have gone when the next node
  // takes three.
  EXPECT_NEAR(step.intervals[2].released_bytes, kTensorBytes, 2 * kKiB);
  EXPECT_NEAR(step.intervals[2].peak_other_bytes() + kTensorBytes, before + 3 * kTensorBytes,
              2 * kKiB);
}

TEST_F(StepRecorderTest, WhatSomebodyElseHoldsIsThereAtThePeakOfItsLastReader) {
  const uint64_t before = world_.device_bytes();
  at::Tensor kept;
  const StepTrace step = RecordStep([&] {
    kept = activation();
    return Probe(carrier_, {kept}, TakeMore);
  });
  ASSERT_THAT(Frees(step), ElementsAre(false));
  EXPECT_NEAR(step.intervals[2].peak_other_bytes(), before + 4 * kTensorBytes, 2 * kKiB);
}

TEST_F(StepRecorderTest, WhatASessionTakesAndGivesBackIsNotTransient) {
  class TakesAndGivesBack : public SavedTensorPacker {
   public:
    std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
      at::ones({3 * kTensorBytes / 4}, at::TensorOptions(tensor.device()));
      return KeepTensor(tensor);
    }
  };
  RecordForward([&] {
    const SavedTensorScope scope(std::make_shared<TakesAndGivesBack>());
    Chain(2);
  });
  EXPECT_THAT(FieldOf(Finish().intervals, &StepInterval::transient_bytes), Each(Lt(kThreeTensors)));
}

TEST_F(StepRecorderTest, WithoutAnObserverWhatWasThereAtAStretchsBeginAndHasGoneIsTransient) {
  const std::set<torch::profiler::impl::ActivityType> activities = {
      torch::profiler::impl::ActivityType::CPU};
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
  at::Tensor held = Leaf(2);
  RecordForward([&] {
    const at::Tensor y = Chain(1);
    held.reset();
    activation(4 * kTensorBytes);
    Chain(1, y);
  });
  torch::autograd::profiler::disableProfiler();
  const StepTrace step = Finish();
  // In all of the interval one of the two counts for the object that it makes.
  EXPECT_NEAR(step.intervals[1].transient_bytes, kTensorBytes, 2 * kKiB);
}

TEST_F(StepRecorderTest, BackwardsAreObservedUntilTheStepIsFinished) {
  bool is_observed = false;
  const auto run_backward = [&] {
    Probe(carrier_, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
      is_observed = c10::memoryProfilingEnabled();
      return grad;
    }).backward();
  };
  { const RecordScope record(recorder_); }
  run_backward();
  EXPECT_TRUE(is_observed);
  Finish();
  run_backward();
  EXPECT_FALSE(is_observed);
}

TEST_F(StepRecorderTest, ComputeIsTheDevicesTime) {
  const at::Tensor x = activation(4 * kMiB);
  ASSERT_THAT(world_.Synchronize(), IsOk());
  world_.machine().ResetTimeStats(0);
  const StepTrace step = RecordStep([&] {
    // Long operators, so that the host runs ahead and the device never idles.
    const at::Tensor y = Probe(carrier_, {at::mul(x, 2)}, UseSaved);
    for (int i = 0; i < 100; ++i) at::mul(x, 2);
    return Probe(y, {at::mul(x, 2)}, UseSaved);
  });
  const double busy_us = 1e3 * world_.machine().time_stats(0).compute_busy_ms;
  EXPECT_GT(busy_us, 100);
  EXPECT_NEAR(step.compute_us(), busy_us, 0.2 * busy_us);
  EXPECT_GT(step.intervals[1].compute_us, 0.7 * busy_us);
}

// --- Beside a session ---

TEST_F(StepRecorderTest, BesideASessionTheRecordIsThatOfTheStepWithoutOne) {
  const auto run = [this](bool offload) {
    return RecordStep([&] {
      std::optional<OffloadScope> scope;
      if (offload) scope.emplace(world_.session());
      return Chain(6);
    });
  };
  run(false);  // the gradients are there from now on
  const StepTrace plain = run(false);
  const StepTrace beside = run(true);
  const OffloadStats stats = world_.QuietStats();
  EXPECT_EQ(stats.offloaded, 6u);
  EXPECT_GE(stats.evicted_bytes, 4u * kTensorBytes);
  EXPECT_GE(stats.fetched_bytes, 4u * kTensorBytes);
  EXPECT_THAT(plain.accesses, SizeIs(12));
  ExpectSameUses(plain, beside);
  EXPECT_EQ(OtherBytes(plain), OtherBytes(beside));
}

TEST_F(StepRecorderTest, InsideASessionsScopeItIsTheSame) {
  const StepTrace step = RecordStep([&] { return Chain(6); }, world_.session());
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0));
  const OffloadStats stats = world_.QuietStats();
  EXPECT_EQ(stats.offloaded, 6u);
  EXPECT_GT(stats.evicted_bytes, 0u);
  EXPECT_GT(stats.fetched_bytes, 0u);
}

TEST_F(StepRecorderTest, ACastThatIsSavedTwiceCanBeComputedAgain) {
  const at::Tensor weight = Leaf().requires_grad_(true);
  const auto record = [&] {
    const auto save_twice = [&] {
      const at::Tensor cast = weight.to(at::kBFloat16);
      return Probe(Probe(carrier_, {cast}, UseSaved), {cast}, UseSaved);
    };
    return RecordStep(save_twice, world_.session());
  };
  EXPECT_FALSE(record().objects.at(0).recast_us.has_value()) << "the weight is not known yet";
  const StepTrace step = record();
  EXPECT_THAT(step.accesses, ElementsAre(0, 0, 0, 0));
  EXPECT_TRUE(step.objects.at(0).recast_us.has_value());
}

TEST_F(StepRecorderTest, ASessionThatRecordsTheStepItselfTellsWhatItCanComputeAgain) {
  const auto session = world_.NewSession(WithTarget(64 * kMiB));
  const at::Tensor weight = Leaf().requires_grad_(true);
  const auto record = [&](int activations) {
    const auto save = [&] {
      return Chain(activations, Probe(carrier_, {weight.to(at::kBFloat16)}, UseSaved));
    };
    return RecordStep(save, session);
  };
  record(0);
  // The session records this step as well, since the last one was another.
  EXPECT_TRUE(record(1).objects.at(0).recast_us.has_value());
}

TEST_F(StepRecorderTest, NestedScopesAreRecordedAsOne) {
  const auto save = [this] {
    const OffloadScope outer(world_.session());
    at::Tensor y = Chain(1);
    {
      const OffloadScope inner(world_.session());
      y = Chain(1, y);
      const NoOffloadScope none;
      y = Chain(1, y);
    }
    return Chain(1, y);
  };
  const StepTrace step = RecordStep([&] { return RecordForward(save); });
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 2, 3, 3, 2, 1, 0));
  const OffloadStats recorded = world_.QuietStats();
  EXPECT_EQ(recorded.packed, 3u);
  EXPECT_EQ(recorded.offloaded, 3u);
  EXPECT_GT(recorded.evicted_bytes, 0u);
  EXPECT_GT(recorded.fetched_bytes, 0u);
  // Without a recorder, nested scopes offload the same.
  save().backward();
  const OffloadStats both = world_.QuietStats();
  EXPECT_EQ(both.offloaded, 2 * recorded.offloaded);
  EXPECT_EQ(both.evicted_bytes, 2 * recorded.evicted_bytes);
  EXPECT_EQ(both.fetched_bytes, 2 * recorded.fetched_bytes);
  EXPECT_EQ(both.prefetch_hits, 2 * recorded.prefetch_hits);
}

TEST_F(StepRecorderTest, ResultsHaveTheSameBitsWithARecorder) {
  const TestNet net(world_.device(), at::kFloat);
  const Gradients expected = TrainStep(net, nullptr);
  const std::shared_ptr<OffloadSession> evicting = world_.NewSession(SmallWindows(1));
  for (const auto& session : {std::shared_ptr<OffloadSession>(), evicting}) {
    RecordForward([&] { ExpectSameGradients(expected, TrainStep(net, session)); });
    EXPECT_GT(Finish().objects.size(), 10u);
  }
  const OffloadStats stats = evicting->GetStats();
  EXPECT_GT(stats.offloaded, 10u);
  EXPECT_GT(stats.evicted_bytes, 0u);
  EXPECT_GT(stats.fetched_bytes, 0u);
}

TEST_F(StepRecorderWithSlowCopies, WaitsForCopiesAreNoCompute) {
  RecordSlowStep(world_.session(), /*least_ms=*/100);
  EXPECT_GT(world_.QuietStats().evicted_bytes, 0u);
}

TEST_F(StepRecorderWithSlowCopies, WaitsAtTheEndOfABackwardAreNoCompute) {
  // Nothing is evicted: backward finds all tensors resident and frees them after the D2H copies.
  const std::shared_ptr<OffloadSession> session = world_.NewSession(SmallWindows(kMiB));
  const StepTrace step = RecordSlowStep(session, /*least_ms=*/15);  // the tensors share copies
  EXPECT_THAT(Frees(step), ElementsAre(true, true, true, true, true, true));
  EXPECT_EQ(session->GetStats().offloaded, 6u);
  EXPECT_EQ(session->GetStats().evicted_bytes, 0u);
}

TEST_F(StepRecorderTest, NothingWaitsForTheDeviceBeforeTheEnd) {
  const auto waits = [this] {
    return world_.machine().calls(DeviceCall::kSynchronize) +
           world_.machine().calls(DeviceCall::kWaitEvent) +
           world_.machine().calls(DeviceCall::kQueryEvent);
  };
  const auto run = [this] { Chain(6).backward(); };
  run();  // starts autograd's workers
  uint64_t before = waits();
  run();
  const uint64_t plain = waits() - before;
  before = waits();
  RecordForward(run);
  EXPECT_EQ(waits() - before, plain);
  EXPECT_THAT(Finish().accesses, SizeIs(12));
  EXPECT_GT(waits() - before, plain);
}

// --- Several devices, several steps ---

TEST_F(StepRecorderOnTwoDevices, EachDeviceHasItsOwnRecord) {
  const at::Tensor other_carrier =
      at::ones({1}, at::TensorOptions(world_.device(1))).requires_grad_(true);
  at::Tensor y, z;
  RecordForward([&] {
    const OffloadScope scope(world_.session());
    y = Chain(3);
    z = Probe(other_carrier, {Activation(other_carrier, {kTensorBytes})}, UseSaved);
  });
  y.backward();
  z.backward();
  absl::StatusOr<std::map<int, StepTrace>> steps = recorder_->Finish();
  ASSERT_THAT(steps, IsOk());
  ASSERT_THAT(*steps, SizeIs(2));
  const int first = world_.device().index();
  const int second = world_.device(1).index();
  EXPECT_THAT((*steps)[first].accesses, ElementsAre(0, 1, 2, 2, 1, 0));
  EXPECT_THAT((*steps)[second].accesses, ElementsAre(0, 0));
  EXPECT_THAT(Sizes((*steps)[second]), ElementsAre(4 * kTensorBytes));
  EXPECT_THAT((*steps)[second].Validate(), IsOk());
  EXPECT_GT((*steps)[second].intervals[2].compute_us, 0);
  EXPECT_EQ(world_.QuietStats().offloaded, 4u);
}

TEST_F(StepRecorderTest, AGraphThatIsKeptIsReadAgain) {
  at::Tensor y = RecordForward([&] { return Chain(2); });
  y.backward({}, /*retain_graph=*/true);
  y.backward({}, /*retain_graph=*/true);
  const StepTrace step = Finish();
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 1, 0, 1, 0));
  // The graph still holds them, and nobody else.
  EXPECT_THAT(Frees(step), ElementsAre(true, true));
}

TEST_F(StepRecorderTest, ReadsOfABackwardThatMakesAGraphAreMarked) {
  at::Tensor x = Activation(carrier_, {kTensorBytes / 4}).requires_grad_(true);
  at::Tensor y = RecordForward([&] { return x.sin().sin().sum(); });
  torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
  y.backward();
  const StepTrace step = Finish();
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 1, 0, 1, 0));
  EXPECT_THAT(step.graph_reads, ElementsAre(2, 3));
}

TEST_F(StepRecorderTest, AReadOutsideOfABackwardIsNoneOfABackwardThatMakesAGraph) {
  at::Tensor y =
      RecordForward([&] { return OwnFormula::apply(activation().requires_grad_(true).sin()); });
  auto* const node = dynamic_cast<torch::autograd::CppNode<OwnFormula>*>(y.grad_fn().get());
  ASSERT_NE(node, nullptr);
  node->ctx_.get_saved_variables();
  y.sum().backward();
  const StepTrace step = Finish();
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 1, 1, 0));
  EXPECT_THAT(step.graph_reads, IsEmpty());
}

TEST_F(StepRecorderTest, WhatUserCodeReadsComesAlone) {
  const StepTrace step =
      RecordStep([&] { return OwnFormula::apply(activation().requires_grad_(true).sin()).sum(); });
  ASSERT_THAT(step.objects, SizeIs(2));
  EXPECT_FALSE(step.objects[0].comes_alone) << "LibTorch's own formula reads it";
  EXPECT_TRUE(step.objects[1].comes_alone);
}

TEST_F(StepRecorderTest, AStepThatNeverEndsIsAbandoned) {
  at::Tensor y = RecordForward([&] {
    const auto read = [](const at::Tensor& grad, const UnpackSaved& unpack) {
      unpack();
      return grad;
    };
    at::Tensor made = carrier_;
    for (int i = 0; i < 1000; ++i) made = Probe(made, {activation(1024)}, read);
    return made;
  });
  for (size_t entries = 0; entries < DeviceRecording::kMaxEntries; entries += 1000) {
    y.backward({}, /*retain_graph=*/true);
  }
  EXPECT_THAT(recorder_->Finish(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("abandoned")));
}

TEST_F(StepRecorderTest, WhatComesAfterTheEndOfAStepIsNotPartOfTheNext) {
  at::Tensor y = RecordForward([&] { return Chain(2); });
  EXPECT_THAT(Finish().accesses, ElementsAre(0, 1));
  at::Tensor z = RecordForward([&] { return Chain(1); });
  const uint64_t events = world_.machine().calls(DeviceCall::kRecordEvent);
  y.backward();
  EXPECT_EQ(world_.machine().calls(DeviceCall::kRecordEvent), events);
  z.backward();
  EXPECT_GT(world_.machine().calls(DeviceCall::kRecordEvent), events);
  EXPECT_THAT(Finish().accesses, ElementsAre(0, 0));
  EXPECT_THAT(recorder_->Finish(), IsOkAndHolds(IsEmpty()));
}

TEST_F(StepRecorderTest, AGraphMayOutliveItsRecorder) {
  at::Tensor y = RecordForward([&] {
    const OffloadScope scope(world_.session());
    return Chain(3);
  });
  recorder_.reset();
  y.backward();
  EXPECT_EQ(world_.QuietStats().unpacked, 3u);
}

TEST_F(StepRecorderTest, AGraphThatIsDroppedWasSavedAlone) {
  RecordForward([&] {
    const OffloadScope scope(world_.session());
    Chain(4);
  });
  const StepTrace step = Finish();
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(Frees(step), ElementsAre(true, true, true, true));
  EXPECT_EQ(world_.QuietStats().offloaded, 4u);
}

TEST_F(StepRecorderTest, WhatABackwardSavesIsNotRecorded) {
  RecordForward([&] {
    const at::Tensor x = activation();
    const at::Tensor y = at::mul(at::mul(x, x), x).sum();
    torch::autograd::grad({y}, {carrier_}, {}, /*retain_graph=*/true, /*create_graph=*/true);
  });
  const StepTrace step = Finish();
  // Of x and its square, which are saved and read; the graph of the gradient saves x again, and the
  // gradients.
  EXPECT_THAT(step.objects, SizeIs(2));
  EXPECT_THAT(step.accesses, SizeIs(8));
}

// --- Errors in between ---

class RefusesTheSecond : public SavedTensorPacker {
 public:
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    if (++calls_ == 2) throw std::runtime_error("no room");
    return std::make_unique<Kept>(DetachedAlias(tensor));
  }

 private:
  class Kept : public SavedTensor {
   public:
    explicit Kept(at::Tensor tensor) : tensor_(std::move(tensor)) {}
    at::Tensor Unpack() override { return tensor_; }

   private:
    const at::Tensor tensor_;
  };
  int calls_ = 0;
};

TEST_F(StepRecorderTest, WhatCouldNotBePackedIsNotRecorded) {
  RecordForward([&] {
    const SavedTensorScope scope(std::make_shared<RefusesTheSecond>());
    const at::Tensor y = Chain(1);
    EXPECT_THROW(Chain(1, y), std::runtime_error);
    Probe(y, {activation(2 * kTensorBytes)}, UseSaved).backward();
  });
  const StepTrace step = Finish();
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(Sizes(step), ElementsAre(kTensorBytes, 2 * kTensorBytes));
}

TEST_F(StepRecorderTest, AForwardThatFailsLeavesTheNextStepAlone) {
  EXPECT_THROW(RecordForward([&] {
                 const OffloadScope scope(world_.session());
                 const at::Tensor y = Chain(2);
                 throw std::runtime_error("in forward");
               }),
               std::runtime_error);
  EXPECT_THAT(Finish().accesses, ElementsAre(0, 1));
  EXPECT_THAT(RecordStep([&] { return Chain(1); }).accesses, ElementsAre(0, 0));
}

class StepRecorderDuringCapture : public StepRecorderTest {
 protected:
  void SetCapturing(bool is_capturing) {
    EXPECT_THAT(world_.machine().SetCapturing(stream_, is_capturing), IsOk());
  }

 private:
  const StreamHandle stream_ = NativeStream(CurrentStream(world_.device()));
};

TEST_F(StepRecorderDuringCapture, NothingIsRecordedWhileAGraphIsCaptured) {
  const StepTrace step = RecordStep([&] {
    const at::Tensor y = Chain(1);
    SetCapturing(true);
    const at::Tensor captured = Chain(1, y);
    SetCapturing(false);
    return captured;
  });
  EXPECT_THAT(step.accesses, ElementsAre(0, 0));
}

TEST_F(StepRecorderDuringCapture, AScopeMayBeOpenedInACaptureAndAStepIsFinishedAfterIt) {
  SetCapturing(true);
  at::Tensor y = RecordForward([&] {
    SetCapturing(false);
    return Chain(1);
  });
  y.backward();
  SetCapturing(true);
  EXPECT_THAT(recorder_->Finish(), StatusIs(absl::StatusCode::kFailedPrecondition));
  SetCapturing(false);
  EXPECT_THAT(Finish().accesses, ElementsAre(0, 0)) << "nothing is lost";
}

TEST_F(StepRecorderTest, ADeviceThatCannotTimeGivesTheHostsTime) {
  RecordOnForwardingDevice()->FailCalls([](const std::string& call, uint64_t) {
    return call == "CreateTimedEvent" ? absl::UnimplementedError("has no clock") : absl::OkStatus();
  });
  const StepTrace step = RecordStep([&] { return Chain(2); });
  EXPECT_TRUE(step.timed_by_host);
  EXPECT_THAT(step.accesses, ElementsAre(0, 1, 1, 0));
  EXPECT_GT(step.compute_us(), 0);
}

TEST_F(StepRecorderTest, ADeviceIsAskedForOnceHoweverManyStepsAreRecorded) {
  int asked = 0;
  RecordOn([&asked, device_of = world_.backend().device](int index) {
    ++asked;
    return device_of(index);
  });
  asked = 0;  // Create looks at an emulated device
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(RecordStep([&] { return Chain(1); }).accesses, ElementsAre(0, 0));
  }
  EXPECT_EQ(asked, 1);
}

TEST_F(StepRecorderTest, ADeviceThatCannotBeReachedIsLeftOut) {
  RecordOn([](int) { return absl::NotFoundError("no such device"); });
  RecordForward([&] { return Chain(2); }).backward();
  EXPECT_THAT(recorder_->Finish(), IsOkAndHolds(IsEmpty()));
}

TEST_F(StepRecorderTest, ABrokenDevicesErrorIsToldInTheEnd) {
  const auto device = RecordOnForwardingDevice();
  at::Tensor y = RecordForward([&] {
    at::Tensor made = Chain(2);
    device->FailCalls([](const std::string&, uint64_t) {
      return absl::InternalError("the device has fallen off the bus");
    });
    return made;
  });
  y.backward();
  EXPECT_THAT(recorder_->Finish(), StatusIs(absl::StatusCode::kInternal, HasSubstr("fallen off")));
}

TEST_F(StepRecorderTest, CreateRefusesWhatItCannotRecord) {
  const auto device = [](int) { return absl::UnavailableError("nobody asks"); };
  EXPECT_THAT(StepRecorder::Create({"toaster", device}),
              StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(StepRecorder::Create({"mtia", device}),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("\"mtia\"")));
  // A type whose allocator does not count.
  const c10::impl::FakeGuardImpl<c10::kXPU> guard;
  c10::impl::registerDeviceGuard(c10::kXPU, &guard);
  c10::SetAllocator(c10::kXPU, c10::GetCPUAllocator());
  EXPECT_THAT(StepRecorder::Create({"xpu", device}),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("\"xpu\"")));
  c10::impl::registerDeviceGuard(c10::kXPU, nullptr);
}

}  // namespace
}  // namespace pinion::testing
