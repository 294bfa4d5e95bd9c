#include "pinion/device/emulated/emulated_machine.h"

#include <cstring>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

TEST(EmulatedMachineTest, BytesMakeARoundTripThroughPinnedMemory) {
  auto machine = EmulatedMachine::Create({}).value();
  std::shared_ptr<Device> device = machine->device(0);
  const StreamHandle compute = machine->default_stream(0);
  const StreamHandle out = device->CreateStream("d2h").value();
  void* data = device->Allocate(kMiB, compute).value();
  ASSERT_TRUE(machine->PrepareKernel(0, compute).ok());
  std::memset(data, 7, kMiB);
  ASSERT_TRUE(machine->Launch(0, compute, {"fill", {}, {{data, kMiB}}}).ok());
  auto source = device->pinned_source();
  HostSegment host = source->Allocate(kMiB).value();
  EventHandle ready = device->CreateEvent().value();
  ASSERT_TRUE(device->RecordEvent(ready, compute).ok());
  ASSERT_TRUE(device->StreamWaitEvent(out, ready).ok());
  const CopyPiece piece = {host.data, data, kMiB};
  ASSERT_TRUE(device->CopyAsync(CopyDirection::kDeviceToHost, {&piece, 1}, out).ok());
  EXPECT_EQ(static_cast<char*>(host.data)[5], 0);
  EventHandle done = device->CreateEvent().value();
  ASSERT_TRUE(device->RecordEvent(done, out).ok());
  ASSERT_TRUE(device->WaitEvent(done, absl::Seconds(1)).ok());
  EXPECT_EQ(static_cast<char*>(host.data)[5], 7);
  ASSERT_TRUE(device->Free(data, compute).ok());
  ASSERT_TRUE(source->Free(host).ok());
}

}  // namespace
}  // namespace pinion
