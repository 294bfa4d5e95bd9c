// The contract of Device, as a parameterized test suite.
//
//   INSTANTIATE_TEST_SUITE_P(Cuda, DeviceConformanceTest,
//                            testing::Values(DeviceConformanceCase{"cuda", MakeCudaUnderTest}),
//                            DeviceConformanceCaseName);
//
// Include it in one source file of a test binary and instantiate it there.

#ifndef PINION_TESTS_DEVICE_DEVICE_CONFORMANCE_H_
#define PINION_TESTS_DEVICE_DEVICE_CONFORMANCE_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"

namespace pinion {

// A device, with the operations that tests need and Device lacks.
class DeviceUnderTest {
 public:
  virtual ~DeviceUnderTest() = default;
  virtual Device& device() = 0;
  // Enqueues work on `stream` that sets the bytes: a kernel or an asynchronous memset.
  virtual absl::Status Fill(void* data, uint8_t value, uint64_t size_bytes,
                            StreamHandle stream) = 0;
  // Returns unordered accesses that the device detected; checked after each test.
  virtual std::vector<std::string> Complaints() { return {}; }
  // Returns the device's total memory.
  virtual uint64_t memory_bytes() = 0;
};

struct DeviceConformanceCase {
  std::string name;
  std::unique_ptr<DeviceUnderTest> (*make)();
  int index = 0;  // of the device
};

inline std::string DeviceConformanceCaseName(
    const ::testing::TestParamInfo<DeviceConformanceCase>& info) {
  return info.param.name;
}

class DeviceConformanceTest : public ::testing::TestWithParam<DeviceConformanceCase> {
 protected:
  void SetUp() override {
    under_test_ = GetParam().make();
    ASSERT_NE(under_test_, nullptr);
    source_ = device().pinned_source();
    stream_ = device().CreateStream("compute").value();
    other_ = device().CreateStream("other").value();
  }

  void TearDown() override {
    EXPECT_TRUE(device().SynchronizeStream(stream_).ok());
    EXPECT_TRUE(device().SynchronizeStream(other_).ok());
    for (void* data : device_memory_) EXPECT_TRUE(device().Free(data, stream_).ok());
    for (const HostSegment& segment : segments_) EXPECT_TRUE(source_->Free(segment).ok());
    for (EventHandle event : events_) EXPECT_TRUE(device().DestroyEvent(event).ok());
    EXPECT_TRUE(device().DestroyStream(stream_).ok());
    EXPECT_TRUE(device().DestroyStream(other_).ok());
    for (const std::string& complaint : under_test_->Complaints()) ADD_FAILURE() << complaint;
  }

  Device& device() { return under_test_->device(); }

  // Allocates on stream_; TearDown frees the memory.
  uint8_t* OnDevice(uint64_t size_bytes) {
    device_memory_.push_back(device().Allocate(size_bytes, stream_).value());
    return static_cast<uint8_t*>(device_memory_.back());
  }
  uint8_t* Pinned(uint64_t size_bytes) {
    const uint64_t granularity = source_->granularity_bytes();
    segments_.push_back(source_->Allocate(AlignUp(size_bytes, granularity)).value());
    return static_cast<uint8_t*>(segments_.back().data);
  }
  // Memory of one size on the device and on the host.
  struct Buffers {
    uint8_t* there;
    uint8_t* host;
  };
  Buffers MakeBuffers(uint64_t size_bytes) { return {OnDevice(size_bytes), Pinned(size_bytes)}; }
  EventHandle Event() {
    events_.push_back(device().CreateEvent().value());
    return events_.back();
  }
  EventHandle TimedEvent() {
    events_.push_back(device().CreateTimedEvent().value());
    return events_.back();
  }
  EventHandle Record(EventHandle event, StreamHandle stream) {
    EXPECT_TRUE(device().RecordEvent(event, stream).ok());
    return event;
  }
  // Makes later work of `later` wait for the present work of `earlier`.
  void Order(StreamHandle earlier, StreamHandle later) {
    ASSERT_TRUE(device().StreamWaitEvent(later, Record(Event(), earlier)).ok());
  }
  void Fill(void* data, uint8_t value, uint64_t size_bytes, StreamHandle stream) {
    ASSERT_TRUE(under_test_->Fill(data, value, size_bytes, stream).ok());
  }
  void ToHost(void* dst, const void* src, uint64_t size_bytes, StreamHandle stream) {
    const CopyPiece piece = {dst, src, size_bytes};
    ASSERT_TRUE(device().CopyAsync(CopyDirection::kDeviceToHost, {&piece, 1}, stream).ok());
  }
  void ToDevice(void* dst, const void* src, uint64_t size_bytes, StreamHandle stream) {
    const CopyPiece piece = {dst, src, size_bytes};
    ASSERT_TRUE(device().CopyAsync(CopyDirection::kHostToDevice, {&piece, 1}, stream).ok());
  }
  void Synchronize(StreamHandle stream) { ASSERT_TRUE(device().SynchronizeStream(stream).ok()); }

  static void ExpectBytes(const uint8_t* data, uint8_t value, uint64_t size_bytes) {
    for (uint64_t i = 0; i < size_bytes; ++i) {
      ASSERT_EQ(int{data[i]}, int{value}) << "at byte " << i << " of " << size_bytes;
    }
  }

  std::unique_ptr<DeviceUnderTest> under_test_;
  std::shared_ptr<HostMemorySource> source_;
  StreamHandle stream_;
  StreamHandle other_;

 private:
  std::vector<void*> device_memory_;
  std::vector<HostSegment> segments_;
  std::vector<EventHandle> events_;
};

TEST_P(DeviceConformanceTest, NameEndsWithIndex) {
  EXPECT_THAT(device().name(), ::testing::EndsWith(":" + std::to_string(GetParam().index)));
}

TEST_P(DeviceConformanceTest, RoundTripKeepsEveryByteOfEverySize) {
  for (const uint64_t size_bytes : {uint64_t{1}, uint64_t{3}, uint64_t{511}, 4 * kKiB + 1, kMiB}) {
    uint8_t* const there = OnDevice(size_bytes);
    uint8_t* const out = Pinned(size_bytes);
    uint8_t* const back = Pinned(size_bytes);
    for (uint64_t i = 0; i < size_bytes; ++i) out[i] = static_cast<uint8_t>(i * 7 + 3);
    ToDevice(there, out, size_bytes, stream_);
    ToHost(back, there, size_bytes, stream_);
    Synchronize(stream_);
    EXPECT_EQ(std::memcmp(out, back, size_bytes), 0) << size_bytes << " bytes";
  }
}

TEST_P(DeviceConformanceTest, BatchMovesEachPieceToItsPlace) {
  constexpr int kPieces = 17;
  constexpr uint64_t kPieceBytes = 1000;
  uint8_t* const there = OnDevice(kPieces * kPieceBytes);
  uint8_t* const host = Pinned(2 * kPieces * kPieceBytes);
  uint8_t* const back = host + kPieces * kPieceBytes;
  std::vector<CopyPiece> in, out;
  for (int i = 0; i < kPieces; ++i) {
    std::memset(host + i * kPieceBytes, 10 + i, kPieceBytes);
    const int mirrored = kPieces - 1 - i;
    in.push_back({there + mirrored * kPieceBytes, host + i * kPieceBytes, kPieceBytes});
    out.push_back({back + i * kPieceBytes, there + i * kPieceBytes, kPieceBytes});
  }
  ASSERT_TRUE(device().CopyAsync(CopyDirection::kHostToDevice, in, stream_).ok());
  ASSERT_TRUE(device().CopyAsync(CopyDirection::kDeviceToHost, out, stream_).ok());
  Synchronize(stream_);
  for (int i = 0; i < kPieces; ++i) {
    ExpectBytes(back + i * kPieceBytes, static_cast<uint8_t>(10 + kPieces - 1 - i), kPieceBytes);
  }
}

TEST_P(DeviceConformanceTest, WorkOfOneStreamRunsInOrder) {
  const auto [there, first] = MakeBuffers(kMiB);
  uint8_t* const second = Pinned(kMiB);
  Fill(there, 1, kMiB, stream_);
  ToHost(first, there, kMiB, stream_);
  Fill(there, 2, kMiB, stream_);
  ToHost(second, there, kMiB, stream_);
  Synchronize(stream_);
  ExpectBytes(first, 1, kMiB);
  ExpectBytes(second, 2, kMiB);
}

TEST_P(DeviceConformanceTest, StreamWaitOrdersTwoStreamsBothWays) {
  const auto [there, host] = MakeBuffers(kMiB);
  Fill(there, 5, kMiB, stream_);
  Order(stream_, other_);
  ToHost(host, there, kMiB, other_);
  Order(other_, stream_);
  Fill(there, 6, kMiB, stream_);
  Synchronize(other_);
  ExpectBytes(host, 5, kMiB);
}

TEST_P(DeviceConformanceTest, OrderIsTransitiveOverAThirdStream) {
  const StreamHandle third = device().CreateStream("third").value();
  const auto [there, host] = MakeBuffers(kMiB);
  Fill(there, 9, kMiB, stream_);
  Order(stream_, other_);
  Order(other_, third);
  ToHost(host, there, kMiB, third);
  Synchronize(third);
  ExpectBytes(host, 9, kMiB);
  EXPECT_TRUE(device().DestroyStream(third).ok());
}

TEST_P(DeviceConformanceTest, EventThatWasNeverRecordedIsDone) {
  const EventHandle event = Event();
  EXPECT_TRUE(device().QueryEvent(event).value());
  EXPECT_TRUE(device().WaitEvent(event, absl::ZeroDuration()).ok());
  EXPECT_TRUE(device().StreamWaitEvent(stream_, event).ok());
}

TEST_P(DeviceConformanceTest, WaitEventShowsTheHostTheBytes) {
  const auto [there, host] = MakeBuffers(kMiB);
  Fill(there, 3, kMiB, stream_);
  ToHost(host, there, kMiB, stream_);
  const EventHandle event = Record(Event(), stream_);
  ASSERT_TRUE(device().WaitEvent(event, absl::Seconds(10)).ok());
  ExpectBytes(host, 3, kMiB);
  EXPECT_TRUE(device().QueryEvent(event).value());
}

TEST_P(DeviceConformanceTest, PollingAnEventEndsAndShowsTheHostTheBytes) {
  const auto [there, host] = MakeBuffers(kMiB);
  Fill(there, 4, kMiB, stream_);
  ToHost(host, there, kMiB, stream_);
  const EventHandle event = Record(Event(), stream_);
  while (!device().QueryEvent(event).value()) {
  }
  ExpectBytes(host, 4, kMiB);
}

TEST_P(DeviceConformanceTest, RecordingAgainMovesTheEventButNotEarlierWaits) {
  const auto [there, host] = MakeBuffers(2 * kMiB);
  const EventHandle event = Event();
  Fill(there, 1, kMiB, stream_);
  ASSERT_TRUE(device().StreamWaitEvent(other_, Record(event, stream_)).ok());
  ToHost(host, there, kMiB, other_);
  Fill(there + kMiB, 2, kMiB, stream_);
  ASSERT_TRUE(device().StreamWaitEvent(other_, Record(event, stream_)).ok());
  ToHost(host + kMiB, there + kMiB, kMiB, other_);
  Synchronize(other_);
  ExpectBytes(host, 1, kMiB);
  ExpectBytes(host + kMiB, 2, kMiB);
}

TEST_P(DeviceConformanceTest, EventMayBeDestroyedWhileAWaitForItIsQueued) {
  const auto [there, host] = MakeBuffers(kMiB);
  const EventHandle event = device().CreateEvent().value();
  Fill(there, 8, kMiB, stream_);
  ASSERT_TRUE(device().StreamWaitEvent(other_, Record(event, stream_)).ok());
  ASSERT_TRUE(device().DestroyEvent(event).ok());
  ToHost(host, there, kMiB, other_);
  Synchronize(other_);
  ExpectBytes(host, 8, kMiB);
}

TEST_P(DeviceConformanceTest, TimedEventsTellHowLongTheWorkBetweenThemTook) {
  constexpr uint64_t kSize = 4 << 20;
  const auto [data, host] = MakeBuffers(kSize);
  const EventHandle before = Record(TimedEvent(), stream_);
  ToDevice(data, host, kSize, stream_);
  const EventHandle between = Record(TimedEvent(), stream_);
  ToDevice(data, host, kSize, stream_);
  const EventHandle after = Record(TimedEvent(), stream_);
  Synchronize(stream_);
  const double first = device().ElapsedMs(before, between).value();
  const double both = device().ElapsedMs(before, after).value();
  EXPECT_GT(first, 0);
  EXPECT_GT(both, first);
}

TEST_P(DeviceConformanceTest, OnlyTimedEventsThatWereRecordedHaveATime) {
  const EventHandle timed = Record(TimedEvent(), stream_);
  const EventHandle plain = Record(Event(), stream_);
  Synchronize(stream_);
  for (const EventHandle event : {plain, TimedEvent()}) {
    EXPECT_EQ(device().ElapsedMs(timed, event).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(device().QueryEvent(timed).value()) << "the device goes on";
}

TEST_P(DeviceConformanceTest, FreedMemoryIsReusedInTheOrderOfItsStream) {
  uint8_t* const host = Pinned(8 * kMiB);
  for (int i = 0; i < 8; ++i) {
    void* const data = device().Allocate(kMiB, stream_).value();
    Fill(data, static_cast<uint8_t>(i + 1), kMiB, stream_);
    ToHost(host + i * kMiB, data, kMiB, stream_);
    ASSERT_TRUE(device().Free(data, stream_).ok());
  }
  Synchronize(stream_);
  for (int i = 0; i < 8; ++i) ExpectBytes(host + i * kMiB, static_cast<uint8_t>(i + 1), kMiB);
}

TEST_P(DeviceConformanceTest, OutOfMemoryNamesTheSizeAndTheDeviceGoesOn) {
  const uint64_t size_bytes = 2 * under_test_->memory_bytes();
  const absl::Status refusal = device().Allocate(size_bytes, stream_).status();
  ASSERT_EQ(refusal.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refusal.message()), ::testing::HasSubstr(HumanBytes(size_bytes)));
  const auto [there, host] = MakeBuffers(kMiB);
  Fill(there, 1, kMiB, stream_);
  ToHost(host, there, kMiB, stream_);
  Synchronize(stream_);
  ExpectBytes(host, 1, kMiB);
}

TEST_P(DeviceConformanceTest, PinnedSegmentsAreAlignedAndAsLargeAsAsked) {
  const uint64_t granularity = source_->granularity_bytes();
  ASSERT_TRUE(IsPowerOfTwo(granularity));
  for (const uint64_t size_bytes : {granularity, 3 * granularity, AlignUp(5 * kMiB, granularity)}) {
    const HostSegment segment = source_->Allocate(size_bytes).value();
    EXPECT_EQ(segment.size_bytes, size_bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(segment.data) % granularity, 0u);
    std::memset(segment.data, 1, segment.size_bytes);
    EXPECT_TRUE(source_->Free(segment).ok());
  }
}

TEST_P(DeviceConformanceTest, EmptyStreamHandleIsRefusedEverywhere) {
  const StreamHandle none;
  const auto [there, host] = MakeBuffers(kKiB);
  const EventHandle event = Event();
  const CopyPiece piece = {host, there, kKiB};
  const auto refused = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  };
  refused(device().Allocate(kKiB, none).status());
  refused(device().Free(there, none));
  refused(device().SynchronizeStream(none));
  refused(device().IsCapturing(none).status());
  refused(device().RecordEvent(event, none));
  refused(device().StreamWaitEvent(none, event));
  refused(device().CopyAsync(CopyDirection::kDeviceToHost, {&piece, 1}, none));
}

TEST_P(DeviceConformanceTest, NullPointersAndPiecesOfNoBytesAreRefusedAndNothingIsCopied) {
  constexpr uint64_t kBytes = 64;
  uint8_t* const data = OnDevice(kBytes);
  uint8_t* const host = Pinned(kBytes);
  std::memset(host, 1, kBytes);
  Fill(data, 2, kBytes, stream_);
  for (const CopyPiece& bad : {CopyPiece{nullptr, host, kBytes}, CopyPiece{data, nullptr, kBytes},
                               CopyPiece{data, host, 0}}) {
    const CopyPiece pieces[] = {{data, host, kBytes}, bad};
    EXPECT_TRUE(
        absl::IsInvalidArgument(device().CopyAsync(CopyDirection::kHostToDevice, pieces, stream_)));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(device().Free(nullptr, stream_)));
  ToHost(host, data, kBytes, stream_);
  Synchronize(stream_);
  ExpectBytes(host, 2, kBytes);
}

TEST_P(DeviceConformanceTest, StreamDoesNotCaptureUnlessAsked) {
  EXPECT_FALSE(device().IsCapturing(stream_).value());
}

TEST_P(DeviceConformanceTest, ThreadsMayUseOneDeviceTogether) {
  constexpr int kThreads = 4;
  std::vector<uint8_t*> there, host;
  for (int t = 0; t < kThreads; ++t) {
    there.push_back(OnDevice(64 * kKiB));
    host.push_back(Pinned(64 * kKiB));
  }
  Synchronize(stream_);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t, &there, &host] {
      const StreamHandle mine = device().CreateStream("thread " + std::to_string(t)).value();
      for (int round = 0; round < 20; ++round) {
        const uint8_t value = static_cast<uint8_t>(t * 20 + round);
        std::memset(host[t], value, 64 * kKiB);
        ToDevice(there[t], host[t], 64 * kKiB, mine);
        Synchronize(mine);
        std::memset(host[t], 0, 64 * kKiB);
        ToHost(host[t], there[t], 64 * kKiB, mine);
        Synchronize(mine);
        ExpectBytes(host[t], value, 64 * kKiB);
      }
      EXPECT_TRUE(device().DestroyStream(mine).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace pinion

#endif  // PINION_TESTS_DEVICE_DEVICE_CONFORMANCE_H_
