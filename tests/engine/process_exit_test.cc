// Globals with copies in flight at process exit, and children of fork().

#include "pinion/device/process_exit.h"

#include <unistd.h>

#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/faulty_world.h"
#include "pinion/tests/support/forwarding_device.h"

namespace pinion::testing {
namespace {

// Globals, as in a program: destroyed after main.
std::unique_ptr<EngineWorld> global_world;
std::shared_ptr<HostBuffer> global_buffer;

// Destroyed before the globals above. Exits with 4 unless the engine explains why it makes no call.
struct LooksAtTheEngine {
  ~LooksAtTheEngine() {
    if (global_world == nullptr) return;
    const absl::Status health = global_world->engine().health();
    const bool clear =
        absl::IsFailedPrecondition(health) && absl::StrContains(health.message(), "is exiting");
    if (!clear) _exit(4);
  }
} looks_at_the_engine;

Transfer global_transfer;

// Exits with copies in flight. Exits with 3 if the device is called during exit.
[[noreturn]] void ExitWithCopiesInFlight() {
  std::shared_ptr<EmulatedMachine> machine = *EmulatedMachine::Create(TestMachineOptions());
  auto device = std::make_shared<ForwardingDevice>(machine->device(0));
  device->FailCalls([](const std::string&, uint64_t) {
    if (ProcessIsExiting()) _exit(3);
    return absl::OkStatus();
  });
  global_world = std::make_unique<EngineWorld>(machine, device, EngineOptions());
  global_buffer = global_world->NewHostBuffer(kMiB);
  uint8_t* const data = global_world->AllocateDevice(kMiB);
  global_transfer = global_world->CopyIn(global_buffer, data);
  std::exit(0);
}

TEST(ProcessExitDeathTest, NothingCallsTheDeviceWhileTheProcessExits) {
  EXPECT_EXIT(ExitWithCopiesInFlight(), ::testing::ExitedWithCode(0), "");
}

TEST(ProcessExitTest, AProcessThatRunsIsNotExiting) {
  WatchProcess();
  EXPECT_FALSE(ProcessIsExiting());
}

TEST(ProcessExitDeathTest, AForkedChildIsRefusedWithARemedy) {
  GTEST_FLAG_SET(death_test_style, "fast");
  EngineWorld world;
  EXPECT_EXIT(
      {
        const absl::Status refused = world.engine().Mark(world.compute()).status();
        const bool clear =
            absl::IsFailedPrecondition(refused) && absl::StrContains(refused.message(), "fork()");
        _exit(clear ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

// The thread that held a lock does not exist in the child.
TEST(ProcessExitDeathTest, AChildForkedInTheMiddleOfASubmissionIsRefusedToo) {
  GTEST_FLAG_SET(death_test_style, "fast");
  FaultyWorld world;
  uint8_t* const data = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  std::promise<void> submits;
  std::promise<void> go_on;
  world.DuringCall("CopyAsync", 1, [&] {
    submits.set_value();
    go_on.get_future().wait();
  });
  std::thread submitter([&] { world.CopyIn(host, data); });
  submits.get_future().wait();
  EXPECT_EXIT(_exit(absl::IsFailedPrecondition(world.TryCopyIn(host, data).status()) ? 0 : 1),
              ::testing::ExitedWithCode(0), "");
  go_on.set_value();
  submitter.join();
}

}  // namespace
}  // namespace pinion::testing
