#include "pinion/engine/stream/stream_timeline.h"

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/stream/event_pool.h"
#include "pinion/engine/stream/guarded_device.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/engine/faulty_world.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::pinion::internal::EventPool;
using ::pinion::internal::FifoTurn;
using ::pinion::internal::GuardedDevice;
using ::pinion::internal::StreamTimeline;
using ::testing::AllOf;
using ::testing::HasSubstr;

void LaunchLongWork(EmulatedMachine& machine, StreamHandle stream) {
  Kernel kernel;
  kernel.name = "long";
  kernel.flops = 1e15;
  ASSERT_THAT(machine.Launch(0, stream, kernel), IsOk());
}

class StreamTimelineTest : public ::testing::Test {
 protected:
  uint64_t Mark() {
    const FifoTurn::Scope turn(timeline_->turn());
    return timeline_->Mark(events_->Acquire().value()).value();
  }

  const std::shared_ptr<EmulatedMachine> machine_ =
      EmulatedMachine::Create(TestMachineOptions()).value();
  const std::shared_ptr<ForwardingDevice> device_ =
      std::make_shared<ForwardingDevice>(machine_->device(0));
  const std::shared_ptr<GuardedDevice> guarded_ =
      std::make_shared<GuardedDevice>(device_, /*transient_retries=*/0);
  const std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>(guarded_);
  std::shared_ptr<StreamTimeline> timeline_ = std::make_shared<StreamTimeline>(
      guarded_, guarded_->CreateStream("test").value(), StreamTimeline::Ownership::kOwned, "test");
};

TEST_F(StreamTimelineTest, AMarkMovesNoBytes) {
  Mark();
  const DirectionStats stats = timeline_->GetStats();
  EXPECT_EQ(stats.submitted_transfers, 1u);
  EXPECT_EQ(stats.submitted_chunks, 1u);
  EXPECT_EQ(stats.submitted_pieces, 0u);
  EXPECT_EQ(stats.submitted_bytes, 0u);
}

TEST_F(StreamTimelineTest, HowFarItsStreamIsIsFoundOutByHalves) {
  constexpr int kMarks = 64;
  for (const int done : {0, 1, 23, 63, 64}) {
    SCOPED_TRACE(done);
    timeline_ = std::make_shared<StreamTimeline>(guarded_, guarded_->CreateStream("test").value(),
                                                 StreamTimeline::Ownership::kOwned, "test");
    for (int i = 0; i < kMarks; ++i) {
      if (i == done) {
        LaunchLongWork(*machine_, timeline_->stream());
      }
      Mark();
    }
    int queries = 0;
    device_->FailCalls([&queries](const std::string& call, uint64_t) {
      queries += call == "QueryEvent" ? 1 : 0;
      return absl::OkStatus();
    });
    timeline_->Poll();
    device_->FailCalls(nullptr);
    EXPECT_EQ(timeline_->Completed(), static_cast<uint64_t>(done));
    EXPECT_LE(queries, done == kMarks ? 1 : 7);
    ASSERT_THAT(machine_->SynchronizeDevice(0), IsOk());
    timeline_->Poll();
  }
}

// Records every event on `stream`, whichever stream was requested.
class RedirectingDevice : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  StreamHandle stream;
  absl::Status RecordEvent(EventHandle event, StreamHandle) override {
    return ForwardingDevice::RecordEvent(event, stream);
  }
};

// A foreign stream's handle may be reused by another stream, whose progress must not complete
// earlier marks. Here a mark follows long work on the first stream, and another is on the second.
class StreamTimelineForeignTest : public ::testing::Test {
 protected:
  void SetUp() override {
    LaunchLongWork(*machine_, first_);
    Mark(first_);
    last_ = Mark(device_->CreateStream("second").value());
  }
  uint64_t Mark(StreamHandle stream) {
    device_->stream = stream;
    const FifoTurn::Scope turn(timeline_.turn());
    return timeline_.Mark(events_->Acquire().value()).value();
  }

  std::shared_ptr<EmulatedMachine> machine_ = EmulatedMachine::Create(TestMachineOptions()).value();
  std::shared_ptr<RedirectingDevice> device_ =
      std::make_shared<RedirectingDevice>(machine_->device(0));
  std::shared_ptr<GuardedDevice> guarded_ =
      std::make_shared<GuardedDevice>(device_, /*transient_retries=*/0);
  std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>(guarded_);
  StreamHandle first_ = device_->CreateStream("first").value();
  StreamTimeline timeline_{guarded_, first_, StreamTimeline::Ownership::kForeign, "foreign"};
  uint64_t last_ = 0;
};

TEST_F(StreamTimelineForeignTest, PollingAForeignStreamStopsAtTheFirstMarkThatIsNotDone) {
  timeline_.Poll();
  EXPECT_EQ(timeline_.Completed(), 0u);
  ASSERT_THAT(machine_->SynchronizeDevice(0), IsOk());
  LaunchLongWork(*machine_, first_);
  Mark(first_);
  for (int i = 0; i < 3; ++i) Mark(device_->CreateStream("third").value());
  timeline_.Poll();
  EXPECT_EQ(timeline_.Completed(), last_);
}

TEST_F(StreamTimelineForeignTest, OfAForeignStreamTheOldestIsWaitedForFirst) {
  EXPECT_THAT(timeline_.Wait(last_, absl::Milliseconds(1)),
              StatusIs(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(timeline_.Completed(), 0u);
  EXPECT_THAT(timeline_.Wait(last_, absl::Hours(1)), IsOk());
  EXPECT_EQ(timeline_.Completed(), last_);
}

TEST_F(StreamTimelineForeignTest, AStreamThatComesAfterAMarkComesAfterAllBeforeIt) {
  const StreamHandle later = device_->CreateStream("later").value();
  ASSERT_THAT(guarded_->StreamWaitTicket(later, timeline_, last_), IsOk());
  ASSERT_THAT(guarded_->SynchronizeStream(later), IsOk());
  timeline_.Poll();
  EXPECT_EQ(timeline_.Completed(), last_) << "the work of the first stream is done as well";
}

// The last owner may never have polled.
TEST_F(StreamTimelineTest, AStreamWhoseWorkIsDoneIsDestroyedThoughNobodyPolled) {
  const CapturedLog log;
  Mark();
  ASSERT_THAT(machine_->SynchronizeDevice(0), IsOk());
  timeline_.reset();
  EXPECT_EQ(device_->live_streams(), 0);
  EXPECT_EQ(log.text(), "");
}

TEST_F(StreamTimelineTest, AStreamThatCannotBeDestroyedIsReported) {
  device_->FailCalls([](const std::string& call, uint64_t) {
    return call == "DestroyStream" ? absl::UnavailableError("injected") : absl::OkStatus();
  });
  const CapturedLog log;
  timeline_.reset();
  EXPECT_THAT(log.text(), HasSubstr("test: leaked the stream: injected"));
}

TEST_F(StreamTimelineTest, OfAFailedDeviceNothingIsDestroyedNorReported) {
  Mark();
  guarded_->Poison("a test", "on purpose");
  const CapturedLog log;
  timeline_.reset();
  EXPECT_EQ(device_->live_streams(), 1);
  EXPECT_EQ(log.text(), "");
}

TEST_F(StreamTimelineTest, ANumberThatWasNeverGivenIsRefused) {
  Mark();
  const StreamHandle later = guarded_->CreateStream("later").value();
  for (const uint64_t value : {uint64_t{2}, UINT64_MAX}) {
    const auto refused = StatusIs(absl::StatusCode::kInvalidArgument,
                                  AllOf(HasSubstr("test: nothing with the number " +
                                                  std::to_string(value) + " was submitted"),
                                        HasSubstr("use tickets that the engine returned")));
    EXPECT_THAT(timeline_->Wait(value, absl::Seconds(1)), refused);
    EXPECT_THAT(guarded_->StreamWaitTicket(later, *timeline_, value), refused);
  }
  EXPECT_THAT(timeline_->Wait(1, absl::Seconds(1)), IsOk());
}

using StreamTimelineDeathTest = StreamTimelineTest;

TEST_F(StreamTimelineDeathTest, AskedWhyANumberThatWasNeverGivenIsPendingItIsNamed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a device does not survive fork
  Mark();
  EXPECT_DEATH((void)timeline_->WhyPending(2), "test: nothing with the number 2 was submitted");
}

// The thread that finds a destroyed engine's last events done destroys them. It may use the
// timeline meanwhile.
TEST(StreamTimelineLockTest, EventsAreLetGoOfWithoutTheLock) {
  EmulatedOptions machine_options = TestMachineOptions();
  machine_options.faults.stalls = {{.at = 1, .ms = 10'000}};
  EngineOptions options;
  options.drain_timeout = absl::Seconds(1);
  FaultyWorld world(options, machine_options);
  const Transfer in = world.CopyIn(kMiB);
  world.DestroyEngine();
  bool waited = false;
  world.DuringCall("DestroyEvent", 1, [&] {
    waited = true;
    EXPECT_THAT(in.Wait(absl::ZeroDuration()), IsOk());
  });
  EXPECT_THAT(in.Wait(absl::Seconds(30)), IsOk());
  EXPECT_TRUE(waited);
}

}  // namespace
}  // namespace pinion::testing
