// Times at which bytes move: early, late or random, but always in a legal order.

#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/emulated/emulated_fixture.h"

namespace pinion {
namespace {

using ::testing::IsEmpty;

class EmulatedValuesTest : public EmulatedFixture {
 protected:
  EmulatedValuesTest() { StartWithout(EffectSchedule::kLate); }

  void StartWithout(EffectSchedule schedule) {
    EmulatedOptions options = Options();
    options.schedule = schedule;
    options.detect_races = false;
    Start(options);
  }
};

TEST_F(EmulatedValuesTest, ACopyOutReadsItsSourceWhenItTakesEffect) {
  const std::pair<EffectSchedule, int> cases[] = {{EffectSchedule::kEarly, 1},
                                                  {EffectSchedule::kLate, 2}};
  for (const auto& [schedule, read] : cases) {
    StartWithout(schedule);
    const auto [data, host] = MakeBuffers(kKiB);
    Fill(data, 1, kKiB, compute_);
    Order(compute_, out_);
    ASSERT_TRUE(ToHost(host, data, kKiB, out_).ok());
    Fill(data, 2, kKiB, compute_);  // does not wait for the copy
    Synchronize(out_);
    EXPECT_EQ(host[0], read);
  }
}

TEST_F(EmulatedValuesTest, FreedMemoryIsReadByTheCopiesOfEveryRecordedStreamFirst) {
  uint8_t* const data = OnDevice(kKiB);
  uint8_t* const host = Pinned(2 * kKiB);
  Fill(data, 1, kKiB, compute_);
  for (const auto& [stream, dst] : {std::pair(in_, host), std::pair(out_, host + kKiB)}) {
    Order(compute_, stream);
    ASSERT_TRUE(ToHost(dst, data, kKiB, stream).ok());
    ASSERT_TRUE(machine_->RecordStream(data, stream).ok());
  }
  ASSERT_TRUE(Free(data).ok());
  ASSERT_TRUE(machine_->SynchronizeDevice(0).ok());
  EXPECT_EQ(host[0], 1);
  EXPECT_EQ(host[kKiB], 1);
}

TEST_F(EmulatedValuesTest, LateCopyInDeliversWhatTheHostWroteTooEarly) {
  const auto [data, host] = MakeBuffers(kKiB);
  std::memset(host, 1, kKiB);
  ASSERT_TRUE(ToDevice(data, host, kKiB, in_).ok());
  std::memset(host, 2, kKiB);  // reuses the buffer before the copy is done
  Order(in_, compute_);
  ASSERT_TRUE(machine_->PrepareKernel(0, compute_).ok());
  EXPECT_EQ(data[0], 2);
}

TEST_F(EmulatedValuesTest, UnfinishedCopyIntoFreedMemoryHitsItsNextOwner) {
  const auto [data, host] = MakeBuffers(kKiB);
  std::memset(host, 9, kKiB);
  ASSERT_TRUE(ToDevice(data, host, kKiB, in_).ok());
  ASSERT_TRUE(Free(data).ok());  // compute never waited for the copy
  uint8_t* const next = OnDevice(kKiB);
  ASSERT_EQ(next, data);
  Fill(next, 1, kKiB, compute_);
  Synchronize(in_);
  EXPECT_EQ(next[0], 9);
}

TEST_F(EmulatedValuesTest, KernelSeesEverythingThatItsStreamWaitedFor) {
  for (const EffectSchedule schedule :
       {EffectSchedule::kEarly, EffectSchedule::kLate, EffectSchedule::kRandom}) {
    StartWithout(schedule);
    const auto [data, host] = MakeBuffers(kKiB);
    std::memset(host, 3, kKiB);
    ASSERT_TRUE(ToDevice(data, host, kKiB, in_).ok());
    Order(in_, out_);
    Order(out_, compute_);
    ASSERT_TRUE(machine_->PrepareKernel(0, compute_).ok());
    EXPECT_EQ(data[kKiB - 1], 3);
  }
}

TEST_F(EmulatedValuesTest, AFreePoisonsTheMemoryAfterTheCopiesThatItIsOrderedAfter) {
  const auto [data, host] = MakeBuffers(kKiB);
  Fill(data, 1, kKiB, compute_);
  Order(compute_, out_);
  ASSERT_TRUE(ToHost(host, data, kKiB, out_).ok());
  Order(out_, compute_);
  ASSERT_TRUE(Free(data).ok());
  EXPECT_EQ(host[0], 1);
  EXPECT_EQ(data[0], 0xFF);
  EXPECT_EQ(data[kKiB - 1], 0xFF);
}

TEST_F(EmulatedValuesTest, PageableCopiesBlockTheHostAndAreDone) {
  uint8_t* const data = OnDevice(kMiB);
  std::vector<uint8_t> pageable(kMiB, 4);
  ASSERT_TRUE(machine_->Copy(0, data, pageable.data(), kMiB, compute_).ok());
  EXPECT_EQ(data[kMiB - 1], 4);
  std::vector<uint8_t> back(kMiB, 0);
  ASSERT_TRUE(machine_->Copy(0, back.data(), data, kMiB, compute_).ok());
  EXPECT_EQ(back, pageable);
}

TEST_F(EmulatedValuesTest, CopiesInsideAndBetweenDevicesKeepTheirBytes) {
  Start(TwoDevices());
  uint8_t* const here = OnDevice(kMiB);
  uint8_t* const beside = OnDevice(kMiB);
  const StreamHandle compute1 = machine_->default_stream(1);
  uint8_t* const there =
      static_cast<uint8_t*>(machine_->device(1)->Allocate(kMiB, compute1).value());
  const EventHandle allocated = machine_->device(1)->CreateEvent().value();
  ASSERT_TRUE(machine_->device(1)->RecordEvent(allocated, compute1).ok());
  ASSERT_TRUE(device_->StreamWaitEvent(compute_, allocated).ok());
  Fill(here, 6, kMiB, compute_);
  ASSERT_TRUE(machine_->Copy(0, beside, here, kMiB, compute_).ok());
  ASSERT_TRUE(machine_->Copy(0, there, beside, kMiB, compute_).ok());
  Synchronize(compute_);
  EXPECT_EQ(there[kMiB - 1], 6);
  EXPECT_THAT(machine_->races(), IsEmpty());
}

TEST_F(EmulatedValuesTest, PiecesTakeEffectInAnOrderThatNoCallerExpects) {
  uint8_t* const data = OnDevice(1);
  uint8_t* const host = Pinned(2);
  host[0] = 1;
  host[1] = 2;
  const std::vector<CopyPiece> pieces = {{data, host, 1}, {data, host + 1, 1}};
  ASSERT_TRUE(device_->CopyAsync(CopyDirection::kHostToDevice, pieces, compute_).ok());
  Synchronize(compute_);
  EXPECT_EQ(data[0], 1);
}

TEST_F(EmulatedValuesTest, OnePieceOfPageableMemoryMakesTheHostWaitForAll) {
  uint8_t* const data = OnDevice(3);
  uint8_t* const host = Pinned(2);
  uint8_t pageable = 5;
  const std::vector<CopyPiece> pieces = {
      {data, host, 1}, {data + 1, &pageable, 1}, {data + 2, host + 1, 1}};
  ASSERT_TRUE(device_->CopyAsync(CopyDirection::kHostToDevice, pieces, compute_).ok());
  EXPECT_EQ(data[1], 5);
}

TEST_F(EmulatedValuesTest, EarlyCopyInsideADeviceTakesEffectAtOnce) {
  StartWithout(EffectSchedule::kEarly);
  uint8_t* const data = OnDevice(2);
  data[0] = 7;
  ASSERT_TRUE(machine_->Copy(0, data + 1, data, 1, compute_).ok());
  EXPECT_EQ(data[1], 7);
}

TEST_F(EmulatedValuesTest, LongChainOfWaitsIsForcedWithoutRecursion) {
  const auto [data, host] = MakeBuffers(kKiB);
  std::memset(host, 1, kKiB);
  for (int i = 0; i < 20'000; ++i) {
    const StreamHandle mine = i % 2 == 0 ? in_ : out_;
    const StreamHandle next = i % 2 == 0 ? out_ : in_;
    ASSERT_TRUE(ToDevice(data, host, 16, mine).ok());
    const EventHandle event = Record(mine);
    ASSERT_TRUE(device_->StreamWaitEvent(next, event).ok());
    ASSERT_TRUE(device_->DestroyEvent(event).ok());
  }
  Synchronize(in_);
  Synchronize(out_);
  EXPECT_EQ(data[0], 1);
}

// A correct program of random kernels and copies gives the same bytes under every schedule as its
// sequential execution.
class LegalProgramTest : public EmulatedFixture, public ::testing::WithParamInterface<int> {};

TEST_P(LegalProgramTest, GivesTheBytesOfItsPlainExecutionAndNoRace) {
  EmulatedOptions options = Options();
  options.seed = GetParam();
  options.schedule = static_cast<EffectSchedule>(GetParam() % 3);
  options.reuse = GetParam() % 2 == 0 ? ReuseMode::kImmediate : ReuseMode::kQuarantine;
  options.memory_bytes = kMiB;
  Start(options);
  std::mt19937 random(GetParam());
  const auto upto = [&random](uint32_t n) { return random() % n; };

  struct Buffer {
    uint8_t* data;
    bool on_device;
    std::vector<uint8_t> expected;
    StreamHandle last_writer;
    std::vector<StreamHandle> readers;
  };
  constexpr uint64_t kBytes = 2000;
  const std::vector<StreamHandle> streams = {compute_, in_, out_};
  std::vector<Buffer> buffers;
  for (int i = 0; i < 8; ++i) {
    const bool on_device = i % 2 == 0;
    uint8_t* const data = on_device ? OnDevice(kBytes) : Pinned(kBytes);
    std::memset(data, i, kBytes);
    buffers.push_back({data, on_device, std::vector<uint8_t>(kBytes, i), compute_, {}});
  }
  const auto before_reading = [&](Buffer& buffer, StreamHandle stream) {
    if (buffer.last_writer != stream) Order(buffer.last_writer, stream);
    buffer.readers.push_back(stream);
  };
  const auto before_writing = [&](Buffer& buffer, StreamHandle stream) {
    if (buffer.last_writer != stream) Order(buffer.last_writer, stream);
    for (StreamHandle reader : buffer.readers) {
      if (reader != stream) Order(reader, stream);
    }
    buffer.readers.clear();
    buffer.last_writer = stream;
  };
  for (int step = 0; step < 200; ++step) {
    const StreamHandle stream = streams[upto(3)];
    Buffer& a = buffers[2 * upto(4)];      // device memory
    Buffer& b = buffers[2 * upto(4) + 1];  // pinned memory
    const uint64_t offset = upto(kBytes);
    const uint64_t size_bytes = 1 + upto(kBytes - offset);
    switch (upto(5)) {
      case 0: {  // kernel
        before_writing(a, stream);
        const uint8_t value = static_cast<uint8_t>(step);
        Fill(a.data + offset, value, size_bytes, stream);
        std::memset(a.expected.data() + offset, value, size_bytes);
        break;
      }
      case 1:  // copy out
        before_reading(a, stream);
        before_writing(b, stream);
        ASSERT_TRUE(ToHost(b.data + offset, a.data + offset, size_bytes, stream).ok());
        std::memcpy(b.expected.data() + offset, a.expected.data() + offset, size_bytes);
        break;
      case 2:  // copy in
        before_reading(b, stream);
        before_writing(a, stream);
        ASSERT_TRUE(ToDevice(a.data + offset, b.data + offset, size_bytes, stream).ok());
        std::memcpy(a.expected.data() + offset, b.expected.data() + offset, size_bytes);
        break;
      case 3: {  // host access to b
        if (upto(4) != 0) break;
        const EventHandle event = Record(b.last_writer);
        ASSERT_TRUE(device_->WaitEvent(event, absl::InfiniteDuration()).ok());
        ASSERT_TRUE(machine_->HostAccess(b.data, kBytes, /*write=*/false).ok());
        ASSERT_EQ(std::memcmp(b.data, b.expected.data(), kBytes), 0)
            << "seed " << GetParam() << ", step " << step;
        break;
      }
      case 4:  // free a, allocate a replacement
        before_writing(a, compute_);
        ASSERT_TRUE(Free(a.data).ok());
        a.data = OnDevice(kBytes);
        Fill(a.data, 0x55, kBytes, compute_);
        a.expected.assign(kBytes, 0x55);
        break;
    }
  }
  ASSERT_TRUE(machine_->SynchronizeDevice(0).ok());
  for (size_t i = 0; i < buffers.size(); ++i) {
    ASSERT_EQ(std::memcmp(buffers[i].data, buffers[i].expected.data(), kBytes), 0)
        << "seed " << GetParam() << ", buffer " << i;
  }
  EXPECT_THAT(machine_->races(), IsEmpty()) << "seed " << GetParam();
}

INSTANTIATE_TEST_SUITE_P(Seeds, LegalProgramTest, ::testing::Range(1, 241));

}  // namespace
}  // namespace pinion
