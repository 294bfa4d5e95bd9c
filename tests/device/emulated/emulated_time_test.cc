// Cost of each call on the emulated machine, and repeatability of a run.

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/host_arithmetic.h"
#include "pinion/tests/device/emulated/emulated_fixture.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace emulated_time_test {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;

constexpr double kExact = 1e-9;

class EmulatedTimeTest : public EmulatedFixture {
 protected:
  EmulatedTimeTest() { Start(FreeHost()); }
};

TEST_F(EmulatedTimeTest, ACopyIsItsOwnDevices) {
  Start(TwoDevices(FreeHost()));
  const std::shared_ptr<Device> second = machine_->device(1);
  const StreamHandle stream = machine_->default_stream(1);
  const CopyPiece piece = {second->Allocate(kMiB, stream).value(), Pinned(kMiB), kMiB};
  ASSERT_THAT(second->CopyAsync(CopyDirection::kHostToDevice, {&piece, 1}, stream), IsOk());
  ASSERT_THAT(second->SynchronizeStream(stream), IsOk());
  EXPECT_EQ(machine_->time_stats(0).h2d_bytes, 0u);
  EXPECT_EQ(machine_->time_stats(1).h2d_bytes, kMiB);
}

TEST_F(EmulatedTimeTest, AnEventThatIsRecordedAgainForgetsItsEarlierTime) {
  const EventHandle before = device_->CreateTimedEvent().value();
  const EventHandle event = device_->CreateTimedEvent().value();
  Launch("a long time", {}, {}, compute_, /*flops=*/1e15);
  ASSERT_THAT(device_->RecordEvent(event, compute_), IsOk());
  ASSERT_THAT(device_->RecordEvent(before, out_), IsOk());
  ASSERT_THAT(device_->RecordEvent(event, out_), IsOk());
  Synchronize(compute_);
  Synchronize(out_);
  EXPECT_NEAR(device_->ElapsedMs(before, event).value(), 0, 1e-6);
}

TEST_F(EmulatedTimeTest, BatchPaysTheFixedCostOnceAndALittlePerPiece) {
  const auto [data, host] = MakeBuffers(kMiB);
  std::vector<CopyPiece> pieces;
  for (int i = 0; i < 10; ++i) pieces.push_back({host + i * 1000, data + i * 1000, 1000});
  ASSERT_THAT(device_->CopyAsync(CopyDirection::kDeviceToHost, pieces, compute_), IsOk());
  Synchronize(compute_);
  EXPECT_NEAR(machine_->now_ms(), 0.003 + 9 * 0.001 + 10'000 / 57.3e6, kExact);
}

TEST_F(EmulatedTimeTest, KernelTakesTheTimeOfItsTrafficOrOfItsArithmetic) {
  uint8_t* const data = OnDevice(32 * kMiB);
  const struct {
    const char* what;
    double flops, memory_bytes, ms;
  } rows[] = {
      {"its ranges, without traffic of its own", 0, 0, 32.0 * kMiB / 3350e6},
      {"more traffic than its ranges", 0, 3350e6, 1},
      {"less traffic than its ranges", 0, 1, 0},
      {"arithmetic of its type", 2 * 494.5e9, 3350e6, 2},
  };
  for (const auto& [what, flops, memory_bytes, ms] : rows) {
    SCOPED_TRACE(what);
    const double before = machine_->now_ms();
    const Kernel kernel = {.name = "kernel",
                           .reads = {{data, 16 * kMiB}},
                           .writes = {{data + 16 * kMiB, 16 * kMiB}},
                           .flops = flops,
                           .memory_bytes = memory_bytes,
                           .type = ComputeType::kBFloat16};
    ASSERT_THAT(machine_->Launch(0, compute_, kernel), IsOk());
    Synchronize(compute_);
    EXPECT_NEAR(machine_->now_ms() - before, 0.002 + ms, kExact);
  }
  EXPECT_EQ(machine_->time_stats(0).kernels, 4u);
}

// Like cudaMemcpyAsync, copies accept any kind of memory on either side.
TEST_F(EmulatedTimeTest, CopyOfAnyKindTakesItsLinksTime) {
  constexpr uint64_t kSize = kMiB;
  EmulatedOptions options = TwoDevices(FreeHost());
  options.detect_races = false;
  Start(options);
  uint8_t* const here = OnDevice(2 * kSize);
  auto* const there = static_cast<uint8_t*>(
      machine_->device(1)->Allocate(kSize, machine_->default_stream(1)).value());
  uint8_t* const pinned = Pinned(kSize);
  std::vector<uint8_t> memory(kSize);
  uint8_t* const pageable = memory.data();
  const struct {
    const char* what;
    void* dst;
    const void* src;
    double ms;
    uint64_t in, out, out_of_1, kernels;  // as counted by the statistics
  } cases[] = {
      {"in", here, pinned, 0.003 + kSize / 55.6e6, kSize, 0, 0, 0},
      {"out", pinned, here, 0.003 + kSize / 57.3e6, 0, kSize, 0, 0},
      {"in, pageable", here, pageable, 0.003 + kSize / 13e6, kSize, 0, 0, 0},
      {"out, pageable", pageable, here, 0.003 + kSize / 13e6, 0, kSize, 0, 0},
      {"to the other device", there, here, 0.003 + kSize / 57.3e6, 0, kSize, 0, 0},
      {"from the other device", here, there, 0.003 + kSize / 57.3e6, 0, 0, kSize, 0},
      {"inside", here + kSize, here, 0.002 + 2 * kSize / 3350e6, 0, 0, 0, 1},
  };
  for (const auto& [what, dst, src, ms, in, out, out_of_1, kernels] : cases) {
    SCOPED_TRACE(what);
    machine_->ResetTimeStats(0);
    machine_->ResetTimeStats(1);
    const double before = machine_->now_ms();
    ASSERT_THAT(machine_->Copy(0, dst, src, kSize, compute_), IsOk());
    const bool blocks = dst == pageable || src == pageable;
    EXPECT_NEAR(machine_->now_ms() - before, blocks ? ms : 0, kExact);
    Synchronize(compute_);
    EXPECT_NEAR(machine_->now_ms() - before, ms, kExact);
    const TimeStats stats = machine_->time_stats(0), other = machine_->time_stats(1);
    EXPECT_EQ(stats.h2d_bytes, in);
    EXPECT_EQ(stats.d2h_bytes, out);
    EXPECT_EQ(other.d2h_bytes, out_of_1);
    EXPECT_EQ(stats.kernels, kernels);
    EXPECT_EQ(stats.copies + other.copies, 1 - kernels);
    EXPECT_NEAR(stats.h2d_busy_ms, in > 0 ? ms : 0, kExact);
  }
  EXPECT_THAT(machine_->Copy(0, nullptr, nullptr, 0, compute_), IsOk());
  EXPECT_THAT(machine_->Copy(0, pinned, pageable, kSize, compute_), IsInvalid("neither"));
}

TEST_F(EmulatedTimeTest, ArithmeticOfTheHostTakesItsMemorysTimeAndWhatIsInFlightGoesOn) {
  EmulatedOptions options = FreeHost();
  options.preset.host_memory_gb_per_s = 100;
  options.preset.link.fixed_us = 0;
  options.preset.link.d2h_gb_per_s = 10;
  Start(options);
  const auto [data, host] = MakeBuffers(20'000'000);
  ASSERT_THAT(ToHost(host, data, 20'000'000, out_), IsOk());  // 2 ms
  CountHostArithmetic(150'000'000);
  EXPECT_NEAR(machine_->now_ms(), 1.5, kExact);
  Synchronize(out_);
  EXPECT_NEAR(machine_->now_ms(), 2, kExact);
  EXPECT_NEAR(machine_->time_stats(0).stalled_on_copies_ms, 0.5, kExact);  // without arithmetic
  ASSERT_THAT(ToHost(host, data, 10'000'000, out_), IsOk());               // 1 ms
  const EventHandle copied = Record(out_);
  CountHostArithmetic(100'000'000);
  CountHostArithmetic(200'000'000);
  EXPECT_TRUE(device_->QueryEvent(copied).value()) << "the call comes after the arithmetic";
  EXPECT_NEAR(machine_->now_ms(), 5, kExact);
  EXPECT_NEAR(machine_->time_stats(0).d2h_busy_ms, 3, kExact);
  EXPECT_NEAR(machine_->time_stats(0).host_arithmetic_ms, 4.5, kExact);
  machine_->ResetTimeStats(0);
  EXPECT_EQ(machine_->time_stats(0).host_arithmetic_ms, 0);
}

TEST_F(EmulatedTimeTest, ArithmeticOfTheHostIsItsThreadsAndNotThatOfALaterMachine) {
  CountHostArithmetic(150'000'000);
  std::thread([this] { EXPECT_NEAR(machine_->now_ms(), 0, kExact); }).join();
  Start(FreeHost());
  EXPECT_NEAR(machine_->now_ms(), 0, kExact);
}

TEST_F(EmulatedTimeTest, EventIsDoneExactlyWhenVirtualTimeHasReachedIt) {
  EmulatedOptions options = FreeHost();
  options.preset.host_event_us = 100;  // a query every 0.1 ms
  options.preset.memory_gb_per_s = 1;
  options.preset.launch_us = 0;
  Start(options);
  uint8_t* const data = OnDevice(kMiB);
  const EventHandle event = device_->CreateEvent().value();
  Launch("kernel", {{data, 1'000'000}}, {}, compute_);  // 1 ms
  const double start = machine_->now_ms();
  ASSERT_THAT(device_->RecordEvent(event, compute_), IsOk());
  int queries = 1;
  while (!device_->QueryEvent(event).value()) ++queries;
  EXPECT_NEAR(machine_->now_ms() - start, 0.1 * (queries + 1), kExact);
  EXPECT_NEAR(queries, 9, 1);
}

TEST_F(EmulatedTimeTest, AWaitWithoutPatienceTakesNoTime) {
  Launch("long", {}, {}, compute_, /*flops=*/1e12);
  const EventHandle event = Record(compute_);
  for (const absl::Duration timeout : {absl::ZeroDuration(), absl::Milliseconds(-5)}) {
    EXPECT_THAT(device_->WaitEvent(event, timeout), StatusIs(absl::StatusCode::kDeadlineExceeded));
    EXPECT_EQ(machine_->now_ms(), 0);
  }
}

TEST_F(EmulatedTimeTest, ADeviceIsWaitedForAlone) {
  Start(TwoDevices(FreeHost()));
  const Kernel kernel = {.name = "long", .reads = {}, .writes = {}, .flops = 1e12};
  ASSERT_THAT(machine_->Launch(1, machine_->default_stream(1), kernel), IsOk());
  ASSERT_THAT(machine_->SynchronizeDevice(0), IsOk());
  EXPECT_EQ(machine_->now_ms(), 0);
  ASSERT_THAT(machine_->SynchronizeDevice(1), IsOk());
  EXPECT_GT(machine_->now_ms(), 0);
}

TEST_F(EmulatedTimeTest, EveryCallThatBlocksTheHostOnACopyCountsTheStall) {
  EmulatedOptions options = FreeHost();
  options.preset.link.fixed_us = 0;
  Start(options);
  const auto [data, host] = MakeBuffers(16 * kMiB);
  std::vector<uint8_t> pageable(16 * kMiB);
  const double copy_ms = 16.0 * kMiB / 57.3e6;
  const auto stall_of = [this, data = data](const auto& copy) {
    Launch("kernel", {}, {{data, kMiB}}, compute_);
    Order(compute_, out_);
    machine_->ResetTimeStats(0);
    copy();
    EXPECT_THAT(machine_->SynchronizeDevice(0), IsOk());
    return machine_->time_stats(0).stalled_on_copies_ms;
  };
  const auto submit = [&, data = data, host = host] {
    ASSERT_THAT(ToHost(host, data, 16 * kMiB, out_), IsOk());
  };
  const auto wait_for_event = [&] {
    submit();
    ASSERT_THAT(device_->WaitEvent(Record(out_), absl::InfiniteDuration()), IsOk());
  };
  const auto wait_for_stream = [&] {
    submit();
    Synchronize(out_);
  };
  const auto copy_to_pageable = [&, data = data] {
    ASSERT_THAT(ToHost(pageable.data(), data, 16 * kMiB, out_), IsOk());
  };
  EXPECT_NEAR(stall_of(wait_for_event), copy_ms, kExact);
  EXPECT_NEAR(stall_of(wait_for_stream), copy_ms, kExact);
  EXPECT_NEAR(stall_of(submit), copy_ms, kExact);  // SynchronizeDevice waits for it
  EXPECT_NEAR(stall_of(copy_to_pageable), 16.0 * kMiB / 13e6, kExact);
}

// Observable results of a random program with races.
struct Outcome {
  double now_ms;
  double stalled_ms;
  std::vector<uint8_t> bytes;
};

class DeterminismTest : public EmulatedFixture, public ::testing::WithParamInterface<int> {
 protected:
  Outcome Run(uint64_t machine_seed) {
    EmulatedOptions options = Options();
    options.schedule = EffectSchedule::kRandom;
    options.seed = machine_seed;
    options.detect_races = false;
    Start(options);
    std::mt19937 random(GetParam());
    constexpr uint64_t kBytes = 64 * kKiB;
    const auto [data, host] = MakeBuffers(kBytes);
    std::memset(data, 0, kBytes);
    for (int step = 0; step < 200; ++step) {
      const uint64_t offset = random() % kBytes;
      const uint64_t size_bytes = 1 + random() % (kBytes - offset);
      switch (random() % 4) {
        case 0:
          Fill(data + offset, static_cast<uint8_t>(step), size_bytes, compute_);
          break;
        case 1:
          EXPECT_THAT(ToHost(host + offset, data + offset, size_bytes, out_), IsOk());
          break;
        case 2:
          EXPECT_THAT(ToDevice(data + offset, host + offset, size_bytes, in_), IsOk());
          break;
        case 3:
          Order(out_, random() % 2 == 0 ? in_ : compute_);
          break;
      }
    }
    EXPECT_THAT(machine_->SynchronizeDevice(0), IsOk());
    Outcome outcome = {machine_->now_ms(), machine_->time_stats(0).stalled_on_copies_ms, {}};
    outcome.bytes.assign(data, data + kBytes);
    outcome.bytes.insert(outcome.bytes.end(), host, host + kBytes);
    return outcome;
  }
};

TEST_P(DeterminismTest, SameSeedGivesSameTimesAndBytesAndAnotherSeedOtherBytesOfARacyProgram) {
  const Outcome first = Run(5);
  const Outcome again = Run(5);
  const Outcome other = Run(6);
  EXPECT_EQ(first.now_ms, again.now_ms);
  EXPECT_EQ(first.stalled_ms, again.stalled_ms);
  EXPECT_EQ(first.bytes, again.bytes);
  EXPECT_EQ(first.now_ms, other.now_ms);
  EXPECT_NE(first.bytes, other.bytes);
}

INSTANTIATE_TEST_SUITE_P(Programs, DeterminismTest, ::testing::Range(1, 11));

}  // namespace emulated_time_test
}  // namespace pinion
