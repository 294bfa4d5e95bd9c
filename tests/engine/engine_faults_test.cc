// Behavior of the engine when device calls fail.

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/faulty_world.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace engine_faults_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr absl::Duration kLong = absl::Seconds(30);

TEST(EngineFaultsTest, ATransientFailureIsReturnedAndNothingIsWritten) {
  for (const char* call :
       {"IsCapturing", "CreateEvent", "RecordEvent", "StreamWaitEvent", "CopyAsync"}) {
    SCOPED_TRACE(call);
    FaultyWorld world(WithoutRetries());
    uint8_t* const data = world.AllocateDevice(Pattern(2, 100));
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(Pattern(1, 100));
    world.FailNext(call, Injected());

    EXPECT_THAT(world.TryCopyOut(host, data), IsInjected());

    EXPECT_THAT(host->tickets(), IsEmpty());
    ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());
    EXPECT_EQ(world.ReadHost(*host), Pattern(1, 100));
    EXPECT_EQ(world.engine().GetStats().d2h.failed_submits, 1u);
    EXPECT_EQ(world.engine().GetStats().d2h.submitted_transfers, 0u);
    EXPECT_THAT(world.engine().health(), IsOk());

    const Transfer again = world.CopyOut(host, data);
    ASSERT_THAT(again.Wait(kLong), IsOk());
    EXPECT_EQ(world.ReadHost(*host), Pattern(2, 100));
  }
}

// The batch has no merged pieces, so the engine does not retry it piece by piece.
TEST(EngineFaultsTest, ARefusalIsReturnedAndTheEngineGoesOn) {
  for (const absl::Status& refusal : {absl::ResourceExhaustedError("no memory"),
                                      absl::InvalidArgumentError("no memory of this device")}) {
    FaultyWorld world;
    world.FailNext("CopyAsync", refusal);
    EXPECT_THAT(world.TryCopyIn(100), StatusIs(refusal.code()));
    EXPECT_THAT(world.TryCopyIn(100), IsOk());
  }
}

TEST(EngineFaultsTest, WhatMarkAndOrderStreamsCannotDoTheySay) {
  for (const std::string fails : {"IsCapturing", "CreateEvent", "RecordEvent", "StreamWaitEvent"}) {
    SCOPED_TRACE(fails);
    FaultyWorld world(WithoutRetries());
    const StreamHandle later = world.NewStream();
    world.FailAll(fails, Injected());
    const auto says_so = IsInjected();
    EXPECT_THAT(world.engine().OrderStreams(world.compute(), later, kAfterOtherStream), says_so);
    if (fails != "StreamWaitEvent") {
      EXPECT_THAT(world.engine().Mark(later), says_so);
    }
  }
}

TEST(EngineFaultsTest, AWaitThatCannotBeEnqueuedIsAnError) {
  for (const bool timed : {false, true}) {
    for (const char* call : {"IsCapturing", "StreamWaitEvent"}) {
      SCOPED_TRACE(call);
      EngineOptions options = WithoutRetries();
      options.time_transfers = timed;
      FaultyWorld world(options);
      const Transfer in = world.CopyIn(100);
      world.FailNext(call, Injected());
      EXPECT_THAT(in.WaitOn(world.compute(), kReadAfterCopyIn), IsInjected());
    }
  }
}

// No device copies across the border of two allocations, even if they are adjacent and were merged.
TEST(EngineFaultsTest, NeighboursThatTheDeviceRefusesAsOnePieceGoOneByOne) {
  FaultyWorld world;
  uint8_t* const data = world.AllocateDevice(Pattern(1, 200));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(200);
  world.FailNext("CopyAsync", absl::InvalidArgumentError("not inside one allocation"));
  CopyBatch batch(CopyDirection::kDeviceToHost);
  batch.Add(host, 0, data, 100);
  batch.Add(host, 100, data + 100, 100);

  const Transfer out = world.Submit(std::move(batch));

  ASSERT_THAT(out.Wait(kLong), IsOk());
  EXPECT_EQ(world.ReadHost(*host), Pattern(1, 200));
  EXPECT_EQ(world.engine().GetStats().d2h.submitted_pieces, 2u);
}

// The copy is already enqueued when its event cannot be recorded, so the host must wait for it.
TEST(EngineFaultsTest, ACopyWhoseEventCannotBeRecordedIsWaitedFor) {
  FaultyWorld world(WithoutRetries());
  uint8_t* const data = world.AllocateDevice(Pattern(1, 100));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(100);
  world.FailCall("RecordEvent", 2, Injected());

  const Transfer out = world.CopyOut(host, data);
  EXPECT_TRUE(out.IsDone());
  EXPECT_EQ(world.ReadHost(*host), Pattern(1, 100));
  EXPECT_THAT(world.machine().races(), IsEmpty());
}

TEST(EngineFaultsTest, ACopyThatCanNeitherBeMarkedNorWaitedForPoisonsTheEngine) {
  FaultyWorld world(WithoutRetries());
  uint8_t* const data = world.AllocateDevice(Pattern(1, 100));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(100);
  int records = 0;
  world.device->FailCalls([&records](const std::string& call, uint64_t) -> absl::Status {
    if (call == "RecordEvent" && ++records == 2) return Injected();
    if (call == "SynchronizeStream") return absl::UnavailableError("stuck");
    return absl::OkStatus();
  });

  EXPECT_THAT(world.TryCopyOut(host, data),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("RecordEvent: injected")));

  ASSERT_EQ(host->tickets().size(), 1u);
  EXPECT_FALSE(host->tickets()[0].IsDone());
}

TEST(EngineFaultsTest, AStickyErrorNamesTheFirstCallThatFailedForEver) {
  FaultyWorld world;
  uint8_t* const data = world.AllocateDevice(Pattern(1, 100));
  const std::shared_ptr<HostBuffer> before = world.NewHostBuffer(100);
  const Transfer done = world.CopyOut(before, data);
  ASSERT_THAT(done.Wait(kLong), IsOk());
  const Transfer pending = world.CopyOut(world.NewHostBuffer(100), data);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(100);
  world.FailNext("CopyAsync", absl::InternalError("an illegal memory access"));
  const auto is_the_error =
      StatusIs(absl::StatusCode::kInternal,
               AllOf(HasSubstr("CopyAsync"), HasSubstr("an illegal memory access")));

  EXPECT_THAT(world.TryCopyOut(host, data), is_the_error);

  const uint64_t calls = world.device->calls();
  EXPECT_THAT(world.TryCopyIn(before, data), is_the_error);
  EXPECT_THAT(world.engine().Mark(world.compute()), is_the_error);
  EXPECT_THAT(
      world.engine().OrderStreams(world.compute(), StreamHandle(nullptr), kAfterOtherStream),
      is_the_error);
  EXPECT_THAT(world.engine().Drain(kLong), is_the_error);
  EXPECT_THAT(world.engine().health(), is_the_error);
  EXPECT_THAT(pending.Wait(kLong), is_the_error);
  EXPECT_THAT(pending.WaitOn(world.compute(), kReuseAfterCopyOut), is_the_error);
  world.engine().Poll();
  pending.ticket().timeline->Poll();
  world.DestroyEngine();
  EXPECT_EQ(world.device->calls(), calls);
  EXPECT_THAT(world.log.text(), Not(HasSubstr("destroyed with copies in flight")));

  // Completed copies stay completed and keep their bytes. Copies in flight never complete.
  EXPECT_THAT(done.Wait(kLong), IsOk());
  EXPECT_EQ(world.ReadHost(*before), Pattern(1, 100));
  EXPECT_FALSE(pending.IsDone());
  // The failed copy may still be writing.
  ASSERT_EQ(host->tickets().size(), 1u);
  EXPECT_FALSE(host->tickets()[0].IsDone());
  EXPECT_THAT(world.log.text(), HasSubstr("CopyAsync"));
}

TEST(EngineFaultsTest, BlocksOfAPoisonedEngineAreNeverReused) {
  FaultyWorld world;
  uint8_t* const data = world.AllocateDevice(Pattern(1, kMiB));
  std::set<void*> in_flight;
  for (int i = 0; i < 3; ++i) {
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
    in_flight.insert(host->data());
    world.CopyOut(host, data);
  }
  world.FailNext("QueryEvent", DeviceLost());
  world.engine().Poll();
  ASSERT_THAT(world.engine().health(), Not(IsOk()));

  std::vector<std::shared_ptr<HostBuffer>> blocks;
  for (int i = 0; i < 20; ++i) {
    blocks.push_back(world.NewHostBuffer(kMiB));
    EXPECT_EQ(in_flight.count(blocks.back()->data()), 0u);
  }
}

// A stream that waits for an event of a dead device would wait forever.
TEST(EngineFaultsTest, ADeviceDoesNotWaitForCopiesOfAPoisonedOne) {
  EmulatedOptions machine_options = TestMachineOptions();
  machine_options.device_count = 2;
  FaultyWorld world({}, machine_options);
  const std::shared_ptr<TransferEngine> healthy =
      TransferEngine::Create({}, world.machine().device(1)).value();
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(100);
  uint8_t* const from = world.AllocateDevice(Pattern(1, 100));
  uint8_t* const to = world.AllocateDevice(100, 1);
  world.CopyOut(host, from);
  world.FailNext("QueryEvent", DeviceLost());
  world.engine().Poll();

  CopyBatch batch(CopyDirection::kHostToDevice);
  batch.Add(host, 0, to, 100);
  EXPECT_THAT(
      healthy->Submit(std::move(batch), world.compute(1)),
      StatusIs(absl::StatusCode::kInternal, AllOf(HasSubstr("emu:0"), HasSubstr("an ECC error"))));
  EXPECT_THAT(healthy->health(), IsOk());
}

// --- Retries ---

TEST(EngineFaultsTest, ACallThatFailsTwiceIsMadeAgainAndCounted) {
  FaultyWorld world;
  uint8_t* const data = world.AllocateDevice(Pattern(1, 100));
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(100);
  int copies = 0;
  world.device->FailCalls([&copies](const std::string& call, uint64_t) -> absl::Status {
    return call == "CopyAsync" && ++copies <= 2 ? absl::UnavailableError("busy") : absl::OkStatus();
  });

  const Transfer out = world.CopyOut(host, data);
  ASSERT_THAT(out.Wait(kLong), IsOk());
  EXPECT_EQ(copies, 3);
  EXPECT_EQ(world.engine().GetStats().transient_retries, 2u);
  EXPECT_EQ(world.ReadHost(*host), Pattern(1, 100));
}

// Retrying a wait that timed out would double the caller's timeout.
TEST(EngineFaultsTest, ATimeoutIsNotRepeated) {
  FaultyWorld world;
  const Transfer in = world.CopyIn(100);
  int waits = 0;
  world.device->FailCalls([&waits](const std::string& call, uint64_t) -> absl::Status {
    if (call != "WaitEvent") return absl::OkStatus();
    ++waits;
    return absl::DeadlineExceededError("slow");
  });
  EXPECT_THAT(in.Wait(kLong), StatusIs(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(waits, 1);
  EXPECT_EQ(world.engine().GetStats().transient_retries, 0u);
}

// In PyTorch one stuck event kept everything behind it from being recycled: 90 GB of pinned memory
// (pytorch#183501). Pinion's timelines are independent.
TEST(EngineFaultsTest, AStuckDirectionDoesNotHoldBackTheOther) {
  FaultyWorld world;
  const StreamHandle side = world.NewStream();
  uint8_t* const data = world.AllocateDevice(kMiB);
  ASSERT_THAT(world.engine().OrderStreams(world.compute(), side, kAfterOtherStream), IsOk());
  world.Jam(side);
  const Transfer stuck = world.CopyOut(world.NewHostBuffer(kMiB), data, side);

  uint8_t* const other = world.AllocateDevice(kMiB);
  void* reused = nullptr;
  for (int i = 0; i < 3; ++i) {
    const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
    if (i > 0) {
      EXPECT_EQ(host->data(), reused);
    }
    reused = host->data();
    const Transfer in = world.CopyIn(host, other);
    ASSERT_THAT(in.Wait(kLong), IsOk());
  }
  EXPECT_FALSE(stuck.IsDone());
}

TEST(EngineFaultsTest, WaitingForAStuckCopyEndsWithAReason) {
  EmulatedOptions machine_options = TestMachineOptions();
  machine_options.faults.stall_copies_from = 1;
  EngineOptions options;
  options.drain_timeout = absl::Seconds(5);
  FaultyWorld world(options, machine_options);
  const Transfer stuck = world.CopyIn(kMiB);
  const auto says_why = StatusIs(absl::StatusCode::kDeadlineExceeded,
                                 AllOf(HasSubstr("H2D on emu:0"), HasSubstr("submission 1"),
                                       HasSubstr("its copy has not finished")));

  EXPECT_THAT(stuck.Wait(kLong), says_why);
  EXPECT_THAT(world.engine().Drain(kLong), says_why);
  EXPECT_THAT(world.engine().health(), IsOk());

  world.DestroyEngine();
  EXPECT_THAT(world.log.text(), HasSubstr("destroyed with copies in flight"));
  EXPECT_FALSE(stuck.IsDone());
}

// --- Fail the k-th call, for every k ---

constexpr int kTensors = 4;
constexpr uint64_t kTensorBytes = 3000;

// A link so slow that no copy is done before it is waited for.
EmulatedOptions SlowLink() {
  EmulatedOptions options = TestMachineOptions();
  options.preset.link.h2d_gb_per_s = options.preset.link.d2h_gb_per_s = 1e-3;
  options.preset.link.h2d_duplex_gb_per_s = options.preset.link.d2h_duplex_gb_per_s = 1e-3;
  return options;
}

// Splits batches into chunks of half a tensor.
EngineOptions SmallChunks(int transient_retries) {
  EngineOptions options = Chunks(kTensorBytes / 2);
  options.transient_retries = transient_retries;
  return options;
}

// Copies tensors out and in and destroys the engine. With `retry`, a step that fails with
// kUnavailable runs once more.
absl::Status EngineLife(FaultyWorld& world, bool retry,
                        std::vector<std::vector<uint8_t>>& arrived) {
  const StreamHandle compute = world.compute();
  const auto run = [retry](const std::function<absl::Status()>& step) {
    absl::Status status = step();
    if (retry && absl::IsUnavailable(status)) status = step();
    return status;
  };
  std::vector<uint8_t*> data;
  std::vector<std::shared_ptr<HostBuffer>> hosts;
  for (int i = 0; i < kTensors; ++i) {
    data.push_back(world.AllocateDevice(kTensorBytes));
    world.WriteDevice(data[i], Pattern(i, kTensorBytes), compute);
    hosts.push_back(world.NewHostBuffer(kTensorBytes));
    Transfer out;
    PINION_RETURN_IF_ERROR(run([&] {
      absl::StatusOr<Transfer> submitted = world.TryCopyOut(hosts[i], data[i], compute);
      if (submitted.ok()) out = *submitted;
      return submitted.status();
    }));
    PINION_RETURN_IF_ERROR(run([&] { return out.WaitOn(compute, kReuseAfterCopyOut); }));
    world.WriteDevice(data[i], Pattern(100 + i, kTensorBytes), compute);
    if (i == 1) world.engine().Poll();
  }
  PINION_RETURN_IF_ERROR(run([&] { return world.engine().Mark(compute).status(); }));
  for (int i = kTensors - 1; i >= 0; --i) {
    Transfer in;
    PINION_RETURN_IF_ERROR(run([&] {
      absl::StatusOr<Transfer> submitted = world.TryCopyIn(hosts[i], data[i], compute);
      if (submitted.ok()) in = *submitted;
      return submitted.status();
    }));
    hosts[i].reset();
    PINION_RETURN_IF_ERROR(run([&] { return in.WaitOn(compute, kReadAfterCopyIn); }));
    arrived.insert(arrived.begin(), world.ReadDevice(data[i], kTensorBytes, compute));
  }
  PINION_RETURN_IF_ERROR(run([&] { return world.engine().Drain(kLong); }));
  PINION_RETURN_IF_ERROR(run([&] { return world.engine().Shutdown(kLong); }));
  const EngineStats stats = world.engine().GetStats();
  PINION_CHECK(stats.d2h.submitted_chunks >= 2 * stats.d2h.submitted_transfers);
  PINION_CHECK(stats.h2d.submitted_chunks >= 2 * stats.h2d.submitted_transfers);
  for (uint8_t* tensor : data) world.FreeDevice(tensor);
  world.DestroyEngine();
  return absl::OkStatus();
}

uint64_t CallsOfALife() {
  FaultyWorld world(SmallChunks(2), SlowLink());
  const uint64_t before = world.device->calls();
  std::vector<std::vector<uint8_t>> arrived;
  PINION_CHECK(EngineLife(world, false, arrived).ok());
  return world.device->calls() - before;
}

// Makes the k-th call from now on fail once. The result becomes the name of that call.
std::shared_ptr<std::string> FailOnce(FaultyWorld& world, uint64_t k) {
  auto failed = std::make_shared<std::string>();
  const uint64_t fail_at = world.device->calls() + k;
  world.device->FailCalls([failed, fail_at](const std::string& call, uint64_t number) {
    if (number != fail_at) return absl::OkStatus();
    *failed = call;
    return absl::UnavailableError(absl::StrCat("injected in ", call));
  });
  return failed;
}

// The last tickets keep streams alive until the allocator inspects its blocks.
void ExpectNothingLeaked(FaultyWorld& world) {
  EXPECT_THAT(world.machine().races(), IsEmpty());
  EXPECT_EQ(world.machine().memory_stats(0).in_use_bytes, 0u);
  ASSERT_THAT(world.allocator().Trim(0), IsOk());
  EXPECT_EQ(world.allocator().GetStats().locked_bytes.current, 0u);
}

TEST(EngineFaultsTest, WhicheverCallFailsOnceNobodyNoticesAndNothingLeaks) {
  const uint64_t calls = CallsOfALife();
  ASSERT_GT(calls, 80u);
  for (uint64_t k = 1; k <= calls; ++k) {
    SCOPED_TRACE(k);
    FaultyWorld world(SmallChunks(2), SlowLink());
    const std::shared_ptr<std::string> failed = FailOnce(world, k);
    std::vector<std::vector<uint8_t>> arrived;
    ASSERT_THAT(EngineLife(world, false, arrived), IsOk());
    EXPECT_NE(*failed, "");
    for (int i = 0; i < kTensors; ++i) EXPECT_EQ(arrived[i], Pattern(i, kTensorBytes));
    ExpectNothingLeaked(world);
    EXPECT_EQ(world.device->live_streams(), 0);
    EXPECT_EQ(world.device->live_events(), 0);
    EXPECT_EQ(world.log.text(), "");
  }
}

TEST(EngineFaultsTest, WhicheverCallFailsWithoutRetriesTheCallersRetryGivesTheRightBytes) {
  const uint64_t calls = CallsOfALife();
  for (uint64_t k = 1; k <= calls; ++k) {
    SCOPED_TRACE(k);
    FaultyWorld world(SmallChunks(0), SlowLink());
    const std::shared_ptr<std::string> failed = FailOnce(world, k);
    std::vector<std::vector<uint8_t>> arrived;
    ASSERT_THAT(EngineLife(world, true, arrived), IsOk());
    for (int i = 0; i < kTensors; ++i) EXPECT_EQ(arrived[i], Pattern(i, kTensorBytes));
    ExpectNothingLeaked(world);
    // An object that cannot be destroyed is leaked and reported.
    const int leaked = world.device->live_streams() + world.device->live_events();
    EXPECT_LE(leaked, 1) << *failed;
    EXPECT_EQ(world.log.text().empty(), leaked == 0) << *failed;
  }
}

TEST(EngineFaultsTest, WhicheverCallFailsForGoodTheErrorIsClearAndNoCallFollows) {
  const uint64_t calls = CallsOfALife();
  for (uint64_t k = 1; k <= calls; ++k) {
    SCOPED_TRACE(k);
    FaultyWorld world(SmallChunks(2), SlowLink());
    const uint64_t fail_at = world.device->calls() + k;
    std::string failed_call;
    world.device->FailCalls([&](const std::string& call, uint64_t number) -> absl::Status {
      if (number < fail_at) return absl::OkStatus();
      if (failed_call.empty()) failed_call = call;
      return absl::InternalError("injected");
    });
    std::vector<std::vector<uint8_t>> arrived;
    const absl::Status status = EngineLife(world, true, arrived);
    // Destructors make the last calls and can report errors only to the log.
    if (!status.ok()) {
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kInternal,
                                   AllOf(HasSubstr(failed_call), HasSubstr("injected"))));
    }
    EXPECT_THAT(world.log.text(), HasSubstr(failed_call));
    for (size_t i = 0; i < arrived.size(); ++i) {
      EXPECT_EQ(arrived[i], Pattern(kTensors - arrived.size() + i, kTensorBytes));
    }
    world.DestroyEngine();
    EXPECT_EQ(world.device->calls(), fail_at);
    if (failed_call != "DestroyStream" && failed_call != "DestroyEvent") {
      EXPECT_THAT(world.log.text(), Not(HasSubstr("leaked"))) << failed_call;
    }
    EXPECT_THAT(world.machine().races(), IsEmpty());
  }
}

TEST(EngineFaultsTest, CreateReturnsWhatTheDeviceSaidAndLeavesNothingBehind) {
  for (const uint64_t first : {1, 2}) {
    SCOPED_TRACE(first);
    CapturedLog log;
    const std::shared_ptr<EmulatedMachine> machine = *EmulatedMachine::Create(TestMachineOptions());
    auto device = std::make_shared<ForwardingDevice>(machine->device(0));
    device->FailCalls([first](const std::string& call, uint64_t number) -> absl::Status {
      return number >= first && call == "CreateStream" ? absl::UnavailableError("no stream left")
                                                       : absl::OkStatus();
    });
    EXPECT_THAT(TransferEngine::Create({}, device),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no stream left")));
    EXPECT_EQ(device->live_streams(), 0);
  }
}

}  // namespace engine_faults_test
}  // namespace pinion::testing
