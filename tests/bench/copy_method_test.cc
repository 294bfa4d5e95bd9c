#include "pinion/bench/copy_method.h"

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/bench/engine_cases.h"
#include "pinion/bench/null_device.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"

namespace pinion {
namespace {

using ::testing::HasSubstr;

// The parameter is the copy method.
class CopyMethodTest : public ::testing::TestWithParam<BenchMethod> {
 protected:
  BenchCase Case(BenchFlow flow, uint64_t pieces) const {
    return {.flow = flow, .method = GetParam(), .pieces = pieces, .piece_bytes = 64 * kKiB};
  }

  const std::shared_ptr<EmulatedMachine> machine_ = EmulatedMachine::Create({}).value();
  const std::unique_ptr<CopyWorld> world_ =
      CopyWorld::Create(machine_->device(0), machine_->default_stream(0), [this] {
        return machine_->now_ms();
      }).value();
};

TEST_P(CopyMethodTest, EveryByteArrivesWhateverTheFlow) {
  for (const BenchFlow flow :
       {BenchFlow::kDeviceToHost, BenchFlow::kHostToDevice, BenchFlow::kDuplex}) {
    for (const uint64_t pieces : {1, 9}) {
      const BenchCase of = Case(flow, pieces);
      const auto method = NewCopies(*world_, of).value();
      ASSERT_TRUE(TimeCopies(*world_, *method, /*transfers=*/3).ok());
      EXPECT_EQ(method->Verify(), absl::OkStatus()) << CaseName(of);
    }
  }
}

TEST_P(CopyMethodTest, WhatWasNeverCopiedIsFoundOut) {
  for (const BenchFlow flow : {BenchFlow::kDeviceToHost, BenchFlow::kHostToDevice}) {
    const auto method = NewCopies(*world_, Case(flow, /*pieces=*/9)).value();
    EXPECT_TRUE(absl::IsDataLoss(method->Verify())) << FlowName(flow);
  }
}

TEST_P(CopyMethodTest, ADeviceThatMovesNothingIsFoundOut) {
  const auto device = std::make_shared<NullDevice>(NullDevice::Events::kDone);
  const StreamHandle compute = device->CreateStream("compute").value();
  const auto world = CopyWorld::Create(device, compute, [] { return 0.0; }).value();
  const auto method = NewCopies(*world, Case(BenchFlow::kDeviceToHost, /*pieces=*/1)).value();
  ASSERT_TRUE(TimeCopies(*world, *method, /*transfers=*/1).ok());
  const absl::Status status = method->Verify();
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("D2H left a wrong byte at 0 of 65536"));
}

TEST_P(CopyMethodTest, CopiesFollowTheStreamThatTheyAreOrderedAfter) {
  for (const bool ordered : {false, true}) {
    const auto method = NewCopies(*world_, Case(BenchFlow::kDeviceToHost, /*pieces=*/1)).value();
    ASSERT_TRUE(world_->SynchronizeAll().ok());
    const double start_ms = world_->now_ms();
    constexpr double kComputeMs = 5;
    Kernel kernel;
    kernel.name = "long";
    kernel.flops = kComputeMs * machine_->options().preset.float32_tflop_per_s * 1e9;
    ASSERT_TRUE(machine_->PrepareKernel(0, world_->compute()).ok());
    ASSERT_TRUE(machine_->Launch(0, world_->compute(), kernel).ok());
    ASSERT_TRUE(method->Submit(ordered ? world_->compute() : world_->idle()).ok());
    ASSERT_TRUE(method->Wait().ok());
    EXPECT_EQ(world_->now_ms() - start_ms > kComputeMs, ordered);
    ASSERT_TRUE(world_->SynchronizeAll().ok());
  }
}

TEST_P(CopyMethodTest, TimeIsTheClocksFromTheFirstCallToTheLastByte) {
  BenchCase of = Case(BenchFlow::kHostToDevice, /*pieces=*/1);
  of.piece_bytes = 4 * kMiB;
  of.transfers = 3;
  const auto method = NewCopies(*world_, of).value();
  const BenchTime time = TimeCopies(*world_, *method, of.transfers).value();
  const LinkModel& link = machine_->options().preset.link;
  const double link_ms =
      static_cast<double>(CaseBytes(of)) / (link.h2d_gb_per_s * 1e6) + 3 * link.fixed_us * 1e-3;
  EXPECT_GT(time.ms, link_ms);
  EXPECT_LT(time.ms, 1.1 * link_ms);
  EXPECT_GT(time.host_ms, 0);
  EXPECT_LT(time.host_ms, 0.2 * time.ms);
}

INSTANTIATE_TEST_SUITE_P(All, CopyMethodTest,
                         ::testing::Values(BenchMethod::kRaw, BenchMethod::kEngine),
                         [](const auto& info) {
                           return MethodName(BenchCase{.method = info.param});
                         });

}  // namespace
}  // namespace pinion
