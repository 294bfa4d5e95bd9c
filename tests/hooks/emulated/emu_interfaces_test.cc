// Checks an accelerator's interfaces besides operators: allocators, guards, generators.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pinion/allocator/base/check.h"
#include "pinion/device/allocation_bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/tests/hooks/emulated/emu_device_fixture.h"

namespace pinion {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Ne;

constexpr c10::DeviceType kEmu = c10::kPrivateUse1;

class EmuInterfacesTest : public EmuDeviceTest {
 protected:
  static const c10::impl::DeviceGuardImplInterface& Guard() {
    return *c10::impl::getDeviceGuardImpl(kEmu);
  }
  static const at::PrivateUse1HooksInterface& Hooks() { return at::detail::getPrivateUse1Hooks(); }
  static c10::DeviceAllocator& DeviceMemory() { return *c10::getDeviceAllocator(kEmu); }
  static at::HostAllocator& PinnedMemory() { return *at::getHostAllocator(kEmu); }

  static c10::Stream StreamOfNoDevice() { return c10::Stream(c10::Stream::UNSAFE, Emu(2), 1); }
  // Starts a copy that takes the stream some time.
  at::Tensor Keep(const c10::Stream& stream) {
    const c10::StreamGuard guard(stream);
    return Pinned({1 << 20}).to(Emu(), /*non_blocking=*/true);
  }
  static at::Tensor Over(void* data, const at::TensorOptions& options) {
    return at::for_blob(data, {256}).options(options).target_device(Emu()).make_tensor();
  }
  // Releases the tensor, and returns how many bytes the machine frees at once.
  uint64_t BytesFreedWith(at::Tensor tensor) {
    const uint64_t before = machine_->memory_stats(0).in_use_bytes;
    tensor.reset();
    return before - machine_->memory_stats(0).in_use_bytes;
  }
};

// Captures the log for its lifetime.
class LogCapture {
 public:
  LogCapture()
      : previous_(SetLogSink(
            [this](LogSeverity, const std::string& message) { messages_.push_back(message); })) {}
  ~LogCapture() { SetLogSink(previous_); }
  const std::vector<std::string>& messages() const { return messages_; }

 private:
  std::vector<std::string> messages_;
  LogSink previous_;
};

// --- Errors ---

TEST_F(EmuInterfacesTest, CallsThatFailRaiseAndSayWhatTheyDid) {
  const auto event_on = [&](const c10::Stream& stream) {
    c10::Event event(kEmu);
    event.record(stream);
    return event;
  };
  const auto stream = [&] { return Guard().getStream(Emu()); };
  const struct {
    const char* doing;
    DeviceCall call;  // its last call fails
    std::function<void()> run;
  } cases[] = {
      {"allocating device memory", DeviceCall::kAllocate, [&] { at::empty({4}, OnEmu()); }},
      {"copying device memory", DeviceCall::kCopy,
       [&] { DeviceMemory().clone(at::ones({4}, OnEmu()).data_ptr(), 16); }},
      {"resizing a storage", DeviceCall::kCopy, [&] { at::ones({4}, OnEmu()).resize_({8}); }},
      {"copying between host and device", DeviceCall::kCopy, [&] { at::ones({4}).to(Emu()); }},
      {"copying between devices", DeviceCall::kCopy, [&] { at::ones({4}, OnEmu()).to(Emu(1)); }},
      {"waiting for a copy", DeviceCall::kSynchronize, [&] { at::ones({4}).to(Emu()); }},
      {"aten::_local_scalar_dense", DeviceCall::kSynchronize,
       [&] { at::ones({1}, OnEmu()).item(); }},
      {"aten::native_dropout", DeviceCall::kKernel,
       [&] { at::native_dropout(at::ones({1}, OnEmu()), 0.5, true); }},
      {"pinning host memory", DeviceCall::kPin, [&] { Pinned({4}); }},
      {"creating a stream", DeviceCall::kCreateStream,
       [&] { Guard().getStreamNativeHandle(NewStream()); }},
      {"querying a stream", DeviceCall::kRecordEvent, [&] { stream().query(); }},
      {"querying a stream", DeviceCall::kQueryEvent, [&] { stream().query(); }},
      {"synchronizing a stream", DeviceCall::kSynchronize, [&] { stream().synchronize(); }},
      {"synchronizing a device", DeviceCall::kSynchronize, [&] { Guard().synchronizeDevice(0); }},
      {"creating an event", DeviceCall::kCreateEvent, [&] { event_on(stream()); }},
      {"recording an event", DeviceCall::kRecordEvent, [&] { event_on(stream()); }},
      {"querying an event", DeviceCall::kQueryEvent, [&] { event_on(stream()).query(); }},
      {"waiting for an event", DeviceCall::kStreamWaitEvent,
       [&] { event_on(stream()).block(NewStream()); }},
      {"synchronizing an event", DeviceCall::kWaitEvent, [&] { event_on(stream()).synchronize(); }},
  };
  for (const auto& item : cases) {
    Use(Options());
    item.run();
    EmulatedOptions options = Options();
    options.faults.calls = {{item.call, machine_->calls(item.call)}};
    Use(options);
    EXPECT_THAT(ErrorOf(item.run), AllOf(HasSubstr(item.doing), HasSubstr("injected")))
        << item.doing << ", " << DeviceCallName(item.call);
  }
}

TEST_F(EmuInterfacesTest, MemoryThatWasFreedIsRefused) {
  at::Tensor freed = at::ones({256}, OnEmu());
  const at::Tensor stale = Over(freed.data_ptr(), OnEmu());
  freed.reset();
  EXPECT_THAT(ErrorOf([&] { stale.add_(1); }), AllOf(HasSubstr("aten::add"), HasSubstr("free")));
  at::Tensor recorded = stale;
  EXPECT_THAT(ErrorOf([&] { recorded.record_stream(NewStream()); }),
              HasSubstr("recording a stream"));
}

TEST_F(EmuInterfacesTest, WhatABrokenDeviceCannotFreeIsLogged) {
  const auto make_and_drop = [&](bool broken) {
    std::optional<at::Tensor> tensor = at::ones({256}, OnEmu()), pinned = Pinned({4});
    std::optional<c10::Event> event(kEmu);
    event->record(Guard().getStream(Emu()));
    if (broken) machine_->BreakDevice(0, "an error that stays");
    const LogCapture log;
    tensor.reset();
    event.reset();
    pinned.reset();
    return log.messages();
  };
  EXPECT_THAT(make_and_drop(false), IsEmpty());
  EXPECT_THAT(make_and_drop(true),
              ElementsAre(HasSubstr("freeing 1024 bytes of emu:0"),
                          HasSubstr("destroying an event"), HasSubstr("unpinning host memory")));
}

TEST_F(EmuInterfacesTest, AQueryThatFailsDestroysItsEvent) {
  EmulatedOptions options = Options();
  options.faults.calls = {{DeviceCall::kQueryEvent, 1, /*sticky=*/true}};
  Use(options);
  const LogCapture log;
  EXPECT_THAT(ErrorOf([&] { Guard().getStream(Emu()).query(); }), HasSubstr("sticky"));
  EXPECT_THAT(log.messages(), ElementsAre(HasSubstr("destroying an event")));
}

TEST_F(EmuInterfacesTest, ADeviceThatTheMachineDoesNotHaveIsRefusedEverywhere) {
  const c10::Stream nowhere = StreamOfNoDevice();
  c10::Event event(kEmu);
  event.record(Guard().getStream(Emu()));
  const at::Tensor tensor = at::ones({4}, OnEmu());
  const std::function<void()> calls[] = {
      [&] { Guard().setDevice(Emu(2)); },
      [&] { Guard().getStream(Emu(2)); },
      [&] { Guard().getDefaultStream(Emu(2)); },
      [&] { Guard().getNewStream(Emu(2)); },
      [&] { Guard().exchangeStream(nowhere); },
      [&] { Guard().getStreamNativeHandle(nowhere); },
      [&] { Guard().queryStream(nowhere); },
      [&] { Guard().synchronizeStream(nowhere); },
      [&] { c10::Event(kEmu).record(nowhere); },
      [&] { event.block(nowhere); },
      [&] { Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), nowhere); },
      [&] { Hooks().getNewGenerator(2); },
      [&] { Hooks().getDefaultGenerator(2); },
      [&] { Hooks().setCurrentDevice(2); },
  };
  for (size_t i = 0; i < std::size(calls); ++i) {
    EXPECT_THAT(ErrorOf(calls[i]), AllOf(HasSubstr("emu:2"), HasSubstr("2 devices"))) << i;
  }
  EXPECT_THAT(ErrorOf([&] { Guard().getStream(c10::kCPU); }), HasSubstr("expected an emu device"));
}

// --- Devices and streams ---

TEST_F(EmuInterfacesTest, TheCurrentDeviceIsTheThreads) {
  EXPECT_EQ(Guard().deviceCount(), 2);
  EXPECT_EQ(Hooks().deviceCount(), 2);
  EXPECT_EQ(Guard().exchangeDevice(Emu(1)), Emu(0));
  EXPECT_EQ(Guard().getDevice(), Emu(1));
  EXPECT_EQ(at::empty({1}, at::TensorOptions().device(kEmu)).device(), Emu(1));
  EXPECT_EQ(Guard().exchangeDevice(Emu(-1)), Emu(1));
  EXPECT_EQ(Hooks().exchangeDevice(0), 1);
  EXPECT_EQ(Hooks().maybeExchangeDevice(-1), 0);
  EXPECT_EQ(Hooks().getCurrentDevice(), 0);
  Hooks().setCurrentDevice(1);
  EXPECT_EQ(Guard().getDevice(), Emu(1));
  Guard().setDevice(Emu(0));
  EXPECT_EQ(Guard().getDevice(), Emu(0));
  Guard().uncheckedSetDevice(Emu(1));
  EXPECT_EQ(Guard().getDevice(), Emu(1));
  EXPECT_EQ((at::ones({2}, OnEmu(0)) + 1).sum().item<float>(), 4);
  EXPECT_EQ(at::arange(3, OnEmu(0)).device(), Emu(0));
  Guard().uncheckedSetDevice(Emu(2));  // as if a machine with more devices had been replaced
  EXPECT_EQ(Guard().getDevice(), Emu(1));
  Use(Options());
  EXPECT_EQ(Guard().getDevice(), Emu(0));
}

TEST_F(EmuInterfacesTest, AThreadThatUsesAnEarlierMachineStartsAnewOnTheNext) {
  Guard().exchangeStream(NewStream());
  EXPECT_NE(Guard().getStream(Emu()), Guard().getDefaultStream(Emu()));
  EXPECT_EQ(Guard().getStream(Emu(1)), Guard().getDefaultStream(Emu(1)));
  Use(Options());
  EXPECT_EQ(Guard().getStream(Emu()), Guard().getDefaultStream(Emu()));
}

TEST_F(EmuInterfacesTest, NewStreamsComeFromAPoolOf32) {
  std::set<c10::StreamId> ids;
  for (int i = 0; i < 32; ++i) ids.insert(Guard().getStreamFromGlobalPool(Emu(), false).id());
  EXPECT_EQ(ids.size(), 32);
  EXPECT_EQ(ids.count(Guard().getDefaultStream(Emu()).id()), 0);
  EXPECT_EQ(ids.count(NewStream().id()), 1);
}

TEST_F(EmuInterfacesTest, AStreamIsAlwaysTheSameStreamOfTheMachine) {
  const c10::Stream side = NewStream();
  EXPECT_EQ(Guard().getStreamNativeHandle(Guard().getDefaultStream(Emu(1))),
            machine_->default_stream(1).native());
  EXPECT_EQ(Guard().getStreamNativeHandle(side), Guard().getStreamNativeHandle(side));
  EXPECT_NE(Guard().getStreamNativeHandle(side), Guard().getStreamNativeHandle(NewStream()));
  EXPECT_EQ(machine_->calls(DeviceCall::kCreateStream), 2);
}

TEST_F(EmuInterfacesTest, AStreamOfADeviceWithoutANumberIsRefused) {
  const c10::Stream stream(c10::Stream::UNSAFE, c10::Device(kEmu), 1);
  EXPECT_THAT(ErrorOf([&] { stream.query(); }), HasSubstr("no device emu:-1"));
  EXPECT_THAT(ErrorOf([&] { Guard().exchangeStream(stream); }), HasSubstr("no device emu:-1"));
}

TEST_F(EmuInterfacesTest, AnExchangedStreamIsTheCurrentOne) {
  const c10::Stream side = NewStream(), before = Guard().getDefaultStream(Emu());
  EXPECT_EQ(Guard().exchangeStream(side), before);
  EXPECT_EQ(Guard().getStream(Emu()), side);
  EXPECT_EQ(Guard().exchangeStream(before), side);
}

TEST_F(EmuInterfacesTest, StreamsAreDoneOnceTheirWorkIs) {
  const c10::Stream side = NewStream();
  EXPECT_TRUE(side.query());
  const at::Tensor first = Keep(side);
  EXPECT_FALSE(side.query());
  side.synchronize();
  EXPECT_TRUE(side.query());
  const at::Tensor second = Keep(side);
  Guard().synchronizeDevice(0);
  EXPECT_TRUE(side.query());
}

TEST_F(EmuInterfacesTest, EventsAreDoneOnceTheirStreamGotThere) {
  const c10::Stream side = NewStream(), other = NewStream();
  c10::Event event(kEmu);
  EXPECT_TRUE(event.query());
  const at::Tensor first = Keep(side);
  event.record(side);
  EXPECT_FALSE(event.query());
  event.block(other);
  EXPECT_FALSE(other.query());
  event.synchronize();
  EXPECT_TRUE(event.query());
  const at::Tensor second = Keep(side);
  event.record(side);
  EXPECT_FALSE(event.query());
  const uint64_t created = machine_->calls(DeviceCall::kCreateEvent);
  event.record(side);
  EXPECT_EQ(machine_->calls(DeviceCall::kCreateEvent), created);
}

TEST_F(EmuInterfacesTest, EventsCarryNoTime) {
  EXPECT_THAT(ErrorOf([&] { Guard().elapsedTime(nullptr, nullptr, 0); }), HasSubstr("now_ms"));
}

TEST_F(EmuInterfacesTest, IsAnAcceleratorThatIsThere) {
  EXPECT_TRUE(Hooks().isBuilt());
  EXPECT_TRUE(Hooks().isAvailable());
  EXPECT_TRUE(DeviceMemory().initialized());
  for (const int index : {-1, 0, 1, 2}) {
    EXPECT_EQ(Hooks().hasPrimaryContext(static_cast<c10::DeviceIndex>(index)),
              index == 0 || index == 1);
  }
  EXPECT_EQ(Hooks().getPinnedMemoryAllocator(), &PinnedMemory());
}

// --- Memory of the device ---

TEST_F(EmuInterfacesTest, MemoryIsReportedToLibTorch) {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const at::Tensor held = at::empty({256}, OnEmu(1));
  at::empty({1024}, OnEmu(1));
  const auto stats = DeviceMemory().getDeviceStats(1);
  for (const auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes,
                            &stats.requested_bytes}) {
    EXPECT_EQ((*bytes)[kAll].current, 1024);
    EXPECT_EQ((*bytes)[kAll].peak, 5 * 1024);
    EXPECT_EQ((*bytes)[kAll].allocated, 5 * 1024);
    EXPECT_EQ((*bytes)[kAll].freed, 4 * 1024);
  }
  for (const auto* count : {&stats.allocation, &stats.active}) {
    EXPECT_EQ((*count)[kAll].current, 1);
    EXPECT_EQ((*count)[kAll].allocated, 2);
    EXPECT_EQ((*count)[kAll].freed, 1);
  }
  EXPECT_EQ(stats.num_device_alloc, 2);
  EXPECT_EQ(stats.num_device_free, 1);
  const auto [free, total] = DeviceMemory().getMemoryInfo(1);
  EXPECT_EQ(total, Options().memory_bytes);
  EXPECT_EQ(free, total - 1024);
  DeviceMemory().resetPeakStats(1);
  EXPECT_EQ(DeviceMemory().getDeviceStats(1).allocated_bytes[kAll].peak, 1024);
  EXPECT_THAT(ErrorOf([&] { DeviceMemory().resetAccumulatedStats(1); }), HasSubstr("differences"));
}

TEST_F(EmuInterfacesTest, OutOfMemoryErrorsAreCounted) {
  const int64_t before = DeviceMemory().getDeviceStats(0).num_ooms;
  at::empty({1}, OnEmu());
  EXPECT_EQ(DeviceMemory().getDeviceStats(0).num_ooms, before);
  EXPECT_THAT(ErrorOf([&] { at::empty({1 << 26}, OnEmu()); }), Ne("no error"));
  EXPECT_EQ(DeviceMemory().getDeviceStats(0).num_ooms, before + 1);
}

TEST_F(EmuInterfacesTest, NoBytesNeedNoMemory) {
  EXPECT_EQ(at::empty({0}, OnEmu()).data_ptr(), nullptr);
  EXPECT_EQ(DeviceMemory().allocate(0).get(), nullptr);
  EXPECT_EQ(PinnedMemory().allocate(0).get(), nullptr);
  EXPECT_NE(DeviceMemory().allocate(1).get(), nullptr);
  EXPECT_NE(PinnedMemory().allocate(1).get(), nullptr);
  at::Tensor nothing = at::empty({0}, OnEmu());
  nothing.record_stream(NewStream());
  EXPECT_EQ(DeviceMemory().clone(nullptr, 0).get(), nullptr);
}

TEST_F(EmuInterfacesTest, AllocatorsCloneBytes) {
  const at::Tensor tensor = at::arange(256, OnEmu().dtype(at::kFloat));
  const at::DataPtr clone = DeviceMemory().clone(tensor.data_ptr(), 1024);
  EXPECT_TRUE(at::equal(Over(clone.get(), tensor.options()), tensor));
  const at::DataPtr pinned = PinnedMemory().clone("pinned", 7);
  EXPECT_STREQ(static_cast<const char*>(pinned.get()), "pinned");
}

TEST_F(EmuInterfacesTest, ADeviceIsKnownByItsMemory) {
  const at::Tensor tensor = at::ones({256}, OnEmu(1));
  EXPECT_EQ(Hooks().getDeviceFromPtr(tensor.data_ptr()), Emu(1));
  int on_host = 0;
  EXPECT_THAT(ErrorOf([&] { Hooks().getDeviceFromPtr(&on_host); }), HasSubstr("not memory"));
}

// The owner orders its own frees; the machine must wait for the other stream.
TEST_F(EmuInterfacesTest, MemoryOfAnotherOwnerIsRecorded) {
  const c10::Stream side = NewStream();
  at::Tensor owner = at::ones({256}, OnEmu());
  at::Tensor view = Over(owner.data_ptr(), OnEmu());
  const at::Tensor kept = Keep(side);
  view.record_stream(side);
  EXPECT_EQ(BytesFreedWith(std::move(owner)), 0);
}

TEST_F(EmuInterfacesTest, RecordingATensorsOwnStreamHoldsNothing) {
  at::Tensor tensor = at::ones({256}, OnEmu());
  const at::Tensor kept = Keep(Guard().getStream(Emu()));
  tensor.record_stream(Guard().getStream(Emu()));
  EXPECT_EQ(BytesFreedWith(std::move(tensor)), 1024);
}

TEST_F(EmuInterfacesTest, RecordingADataPtrKeepsItForTheOtherStream) {
  const c10::Stream side = NewStream();
  at::Tensor tensor = at::ones({256}, OnEmu());
  const at::Tensor kept = Keep(side);
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), side);
  EXPECT_EQ(BytesFreedWith(std::move(tensor)), 0);
}

TEST_F(EmuInterfacesTest, StoragesShrinkAndGrow) {
  const at::Tensor tensor = at::arange(8, OnEmu());
  Hooks().resizePrivateUse1Bytes(tensor.storage(), 16);
  EXPECT_EQ(tensor.storage().nbytes(), 16);
  EXPECT_EQ(machine_->memory_stats(0).in_use_bytes, AllocationBytes(16));
  EXPECT_EQ(tensor.narrow(0, 0, 2).sum().item<int64_t>(), 1);
  Hooks().resizePrivateUse1Bytes(tensor.storage(), 64);
  EXPECT_EQ(tensor.storage().nbytes(), 64);
  EXPECT_EQ(tensor.narrow(0, 0, 2).sum().item<int64_t>(), 1);
  const at::Tensor foreign = Over(tensor.data_ptr(), OnEmu().dtype(at::kByte));
  EXPECT_THAT(ErrorOf([&] { Hooks().resizePrivateUse1Bytes(foreign.storage(), 512); }),
              AllOf(HasSubstr("256 bytes"), HasSubstr("512")));
}

// --- Pinned memory ---

TEST_F(EmuInterfacesTest, PinnedMemoryIsWholePages) {
  const int64_t before = PinnedMemory().get_stats().allocated_bytes.current;
  std::vector<at::DataPtr> held;
  for (const auto& [size_bytes, page_bytes] : {std::pair(1, 4096), {4096, 4096}, {4097, 8192}}) {
    const at::DataPtr block = PinnedMemory().allocate(size_bytes);
    EXPECT_EQ(PinnedMemory().get_stats().allocated_bytes.current - before, page_bytes);
    EXPECT_TRUE(Hooks().isPinnedPtr(block.get()));
  }
  held.push_back(PinnedMemory().allocate(1));
  held.push_back(PinnedMemory().allocate(1));
  EXPECT_EQ(PinnedMemory().get_stats().allocated_bytes.current - before, 2 * 4096);
  held.clear();
  EXPECT_EQ(PinnedMemory().get_stats().allocated_bytes.current, before);
}

TEST_F(EmuInterfacesTest, PinnedMemoryThatNothingUsesIsUnpinnedAtOnce) {
  at::Tensor pinned = Pinned({4});
  const void* const data = pinned.data_ptr();
  pinned.reset();
  EXPECT_FALSE(Hooks().isPinnedPtr(data));
}

TEST_F(EmuInterfacesTest, PinnedMemoryStaysUntilAllThatUsesItIsDone) {
  const c10::Stream side = NewStream();
  for (const bool to_host : {false, true}) {
    for (const bool by_allocating : {false, true}) {
      at::Tensor pinned = Pinned({1 << 20});
      const at::Tensor tensor = at::ones({1 << 20}, OnEmu());
      Guard().synchronizeDevice(0);
      const auto copy = [&](int64_t length) {
        const at::Tensor host = pinned.narrow(0, 0, length), device = tensor.narrow(0, 0, length);
        (to_host ? host : device).copy_(to_host ? device : host, /*non_blocking=*/true);
      };
      copy(16);
      Guard().getStream(Emu()).synchronize();
      {
        const c10::StreamGuard guard(side);
        copy(1 << 20);
      }
      const char* const last = static_cast<const char*>(pinned.data_ptr()) + (4 << 20) - 1;
      pinned.reset();
      PinnedMemory().empty_cache();
      EXPECT_TRUE(Hooks().isPinnedPtr(last));
      side.synchronize();
      EXPECT_TRUE(Hooks().isPinnedPtr(last));
      by_allocating ? PinnedMemory().allocate(1).clear() : PinnedMemory().empty_cache();
      EXPECT_FALSE(Hooks().isPinnedPtr(last));
    }
  }
  EXPECT_THAT(machine_->races(), IsEmpty());
}

TEST_F(EmuInterfacesTest, UsesOfOtherMemoryAreNotRecorded) {
  const c10::Stream stream = Guard().getStream(Emu());
  const at::DataPtr pinned = PinnedMemory().allocate(1);
  EXPECT_TRUE(PinnedMemory().record_event(pinned.get(), pinned.get_context(), stream));
  at::Tensor pageable = at::ones({4});
  const at::DataPtr& other = pageable.storage().data_ptr();
  EXPECT_FALSE(PinnedMemory().record_event(other.get_context(), other.get_context(), stream));
}

// --- Random numbers ---

TEST_F(EmuInterfacesTest, GeneratorsDoWhatTheCpusDo) {
  const at::Tensor expected = at::randn({4}, at::detail::createCPUGenerator(9));
  const auto draw = [](at::Generator generator) {
    return at::randn({4}, generator, OnEmu()).to(at::kCPU);
  };
  at::Generator generator = Hooks().getNewGenerator(0);
  generator.set_current_seed(9);
  EXPECT_EQ(generator.current_seed(), 9);
  EXPECT_EQ(generator.device(), Emu());
  at::Generator clone = generator.clone();
  EXPECT_EQ(clone.device(), Emu());
  EXPECT_TRUE(at::equal(draw(generator), expected));
  EXPECT_FALSE(at::equal(draw(generator), expected));
  EXPECT_TRUE(at::equal(draw(clone), expected));
  EXPECT_TRUE(at::equal(draw(at::detail::createCPUGenerator(9)), expected));
  const uint64_t seed = generator.seed();
  EXPECT_NE(seed, 0);
  EXPECT_EQ(generator.current_seed(), seed);
  EXPECT_THAT(ErrorOf([&] { generator.set_offset(1); }), HasSubstr("offset"));
  EXPECT_THAT(ErrorOf([&] { generator.get_offset(); }), HasSubstr("offset"));
  EXPECT_THAT(ErrorOf([&] { at::randn({4}, generator, OnEmu(1)); }),
              AllOf(HasSubstr("emu:1"), HasSubstr("generator of emu:0")));
}

}  // namespace
}  // namespace pinion
