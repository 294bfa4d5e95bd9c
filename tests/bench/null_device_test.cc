#include "pinion/bench/null_device.h"

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"

namespace pinion {
namespace {

TEST(NullDeviceTest, ARecordedEventIsDoneAtOnce) {
  NullDevice device(NullDevice::Events::kDone);
  const StreamHandle stream = device.CreateStream("stream").value();
  const EventHandle event = device.CreateEvent().value();
  ASSERT_TRUE(device.RecordEvent(event, stream).ok());
  EXPECT_TRUE(device.QueryEvent(event).value());
  EXPECT_TRUE(device.DestroyEvent(event).ok());
}

TEST(NullDeviceTest, APendingEventIsDoneWhenItIsQueriedForTheSecondTime) {
  NullDevice device(NullDevice::Events::kPending);
  const StreamHandle stream = device.CreateStream("stream").value();
  const EventHandle event = device.CreateEvent().value();
  EXPECT_TRUE(device.QueryEvent(event).value()) << "never recorded";
  for (int record = 0; record < 2; ++record) {
    ASSERT_TRUE(device.RecordEvent(event, stream).ok());
    EXPECT_FALSE(device.QueryEvent(event).value()) << record;
    EXPECT_TRUE(device.QueryEvent(event).value()) << record;
    EXPECT_TRUE(device.QueryEvent(event).value()) << record;
  }
  EXPECT_TRUE(device.DestroyEvent(event).ok());
}

TEST(NullDeviceTest, APendingEventIsDoneOnceTheHostHasWaited) {
  NullDevice device(NullDevice::Events::kPending);
  const StreamHandle stream = device.CreateStream("stream").value();
  const EventHandle event = device.CreateEvent().value();
  ASSERT_TRUE(device.RecordEvent(event, stream).ok());
  ASSERT_TRUE(device.WaitEvent(event, absl::ZeroDuration()).ok());
  EXPECT_TRUE(device.QueryEvent(event).value());
  EXPECT_TRUE(device.DestroyEvent(event).ok());
}

TEST(NullDeviceTest, StreamsDiffer) {
  NullDevice device(NullDevice::Events::kDone);
  EXPECT_FALSE(device.CreateStream("one").value() == device.CreateStream("other").value());
}

TEST(NullDeviceTest, CopiesAreForgotten) {
  NullDevice device(NullDevice::Events::kDone);
  const StreamHandle stream = device.CreateStream("stream").value();
  char from = 'a', to = 'b';
  const CopyPiece piece = {&to, &from, 1};
  ASSERT_TRUE(device.CopyAsync(CopyDirection::kDeviceToHost, {&piece, 1}, stream).ok());
  EXPECT_EQ(to, 'b');
}

TEST(NullDeviceTest, MemoryCanBeWritten) {
  NullDevice device(NullDevice::Events::kDone);
  const StreamHandle stream = device.CreateStream("stream").value();
  char* const data = static_cast<char*>(device.Allocate(100, stream).value());
  data[0] = data[99] = 'x';
  EXPECT_TRUE(device.Free(data, stream).ok());

  const std::shared_ptr<HostMemorySource> source = device.pinned_source();
  const HostSegment segment = source->Allocate(source->granularity_bytes()).value();
  static_cast<char*>(segment.data)[segment.size_bytes - 1] = 'x';
  EXPECT_TRUE(source->Free(segment).ok());
}

TEST(NullDeviceTest, EachKindOfCallIsCounted) {
  NullDevice device(NullDevice::Events::kDone, /*counts=*/true);
  const StreamHandle stream = device.CreateStream("stream").value();
  const EventHandle event = device.CreateEvent().value();
  ASSERT_TRUE(device.RecordEvent(event, stream).ok());
  ASSERT_TRUE(device.StreamWaitEvent(stream, event).ok());
  EXPECT_TRUE(device.QueryEvent(event).value());
  ASSERT_TRUE(device.WaitEvent(event, absl::ZeroDuration()).ok());
  ASSERT_TRUE(device.DestroyEvent(event).ok());
  EXPECT_EQ(device.calls().events, 6);
  EXPECT_EQ(device.calls().copies, 0);
  const CopyPiece pieces[2] = {};
  ASSERT_TRUE(device.CopyAsync(CopyDirection::kDeviceToHost, pieces, stream).ok());
  EXPECT_FALSE(device.IsCapturing(stream).value());
  EXPECT_EQ(device.calls().events, 6);
  EXPECT_EQ(device.calls().copies, 1);
  EXPECT_EQ(device.calls().capture_queries, 1);
}

}  // namespace
}  // namespace pinion
