// Host buffers with tickets of other timelines: a file reader, a computing thread, a program's own
// stream. The engine must order its copies after them.

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/fence.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/copy_lane.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/fake_timeline.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kBytes = 64 * kKiB;

class ForeignTicketsTest : public ::testing::Test {
 protected:
  // Copies the host buffer in and returns the device's bytes.
  std::vector<uint8_t> CopyInAndRead() {
    const Transfer copy = world_.CopyIn(host_, data_);
    EXPECT_THAT(copy.WaitOn(world_.compute(), kReadAfterCopyIn), IsOk());
    return world_.ReadDevice(data_, kBytes);
  }
  DirectionStats copies_in() { return world_.engine().GetStats().h2d; }

  EngineWorld world_;
  const std::shared_ptr<HostBuffer> host_ = world_.NewHostBuffer(kBytes);
  uint8_t* const data_ = world_.AllocateDevice(kBytes);
};

TEST_F(ForeignTicketsTest, ACopyInComesAfterAReaderOfAFileHasFilledItsHostBuffer) {
  const auto reads = std::make_shared<FakeTimeline>();
  host_->AddTicket(reads->Ticket(1));
  std::thread reader([&] {
    while (reads->waits() == 0) absl::SleepFor(absl::Microseconds(20));
    EXPECT_EQ(copies_in().submitted_chunks, 0u);
    world_.WriteHost(*host_, Pattern(1, kBytes));
    reads->CompleteOnDevice(1);
  });
  EXPECT_EQ(CopyInAndRead(), Pattern(1, kBytes));
  reader.join();
  EXPECT_THAT(world_.machine().races(), IsEmpty());
}

TEST_F(ForeignTicketsTest, WithoutTheWaitTheCopyMovesWhatWasThereBefore) {
  const ScopedDisableWaitSite disabled(pinion::internal::kCopyAfterHostBuffer);
  const auto reads = std::make_shared<FakeTimeline>();
  world_.WriteHost(*host_, Pattern(8, kBytes));
  host_->AddTicket(reads->Ticket(1));
  EXPECT_EQ(CopyInAndRead(), Pattern(8, kBytes)) << "the file was read later";
  reads->CompleteOnDevice(1);
}

// The ticket never completes, so these calls must fail before they wait.
TEST_F(ForeignTicketsTest, WhereNothingIsSubmittedNothingIsWaitedFor) {
  const auto reads = std::make_shared<FakeTimeline>();
  host_->AddTicket(reads->Ticket(1));
  ASSERT_THAT(world_.machine().SetCapturing(world_.compute(), true), IsOk());
  EXPECT_THAT(world_.TryCopyIn(host_, data_), StatusIs(absl::StatusCode::kFailedPrecondition));
  ASSERT_THAT(world_.machine().SetCapturing(world_.compute(), false), IsOk());
  ASSERT_THAT(world_.engine().Shutdown(absl::Seconds(1)), IsOk());
  EXPECT_THAT(world_.TryCopyIn(host_, data_), StatusIs(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(reads->waits(), 0u);
  reads->CompleteOnDevice(1);
}

TEST_F(ForeignTicketsTest, WhatIsDoneIsNotWaitedFor) {
  const auto reads = std::make_shared<FakeTimeline>();
  reads->CompleteVisibly(1);
  host_->AddTicket(reads->Ticket(1));
  world_.CopyIn(host_, data_);
  EXPECT_EQ(reads->waits(), 0u);
}

TEST_F(ForeignTicketsTest, NobodyElseWaitsWithACopyWhoseHostBufferIsBeingFilled) {
  const auto reads = std::make_shared<FakeTimeline>();
  const std::shared_ptr<HostBuffer> being_filled = world_.NewHostBuffer(kBytes);
  uint8_t* const other_data = world_.AllocateDevice(kBytes);
  being_filled->AddTicket(reads->Ticket(1));
  std::thread waiting([&] { world_.CopyIn(being_filled, other_data); });
  while (reads->waits() == 0) absl::SleepFor(absl::Microseconds(20));
  world_.WriteHost(*host_, Pattern(2, kBytes));
  EXPECT_EQ(CopyInAndRead(), Pattern(2, kBytes));
  EXPECT_EQ(copies_in().submitted_chunks, 1u) << "the other one still waits";
  reads->CompleteOnDevice(1);
  waiting.join();
  EXPECT_EQ(copies_in().submitted_chunks, 2u);
}

// The read fails permanently.
class FailingTimeline final : public FenceTimeline {
 public:
  uint64_t Completed() const noexcept override { return 0; }
  void Poll() override {}
  absl::Status Wait(uint64_t, absl::Duration) override {
    ++waits;
    return absl::DataLossError("the file is too short");
  }
  int waits = 0;
};

TEST_F(ForeignTicketsTest, AnErrorOfTheOtherTimelineIsThatOfTheCopyWhichIsNotMade) {
  const auto file = std::make_shared<FailingTimeline>();
  host_->AddTicket({file, 1});
  EXPECT_THAT(world_.TryCopyIn(host_, data_),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("the file is too short")));
  EXPECT_EQ(file->waits, 1);
  EXPECT_EQ(copies_in().submitted_chunks, 0u);
  EXPECT_EQ(copies_in().failed_submits, 1u);
  EXPECT_THAT(world_.engine().health(), IsOk());
  world_.CopyIn(world_.NewHostBuffer(kBytes), data_);
}

// Tracks a program's own stream with a single event for all values.
class EventTimeline final : public FenceTimeline {
 public:
  EventTimeline(Device& device, StreamHandle stream)
      : device_(device), event_(device.CreateEvent().value()) {
    EXPECT_THAT(device_.RecordEvent(event_, stream), IsOk());
  }
  int host_waits() const { return host_waits_; }

  uint64_t Completed() const noexcept override { return completed_; }
  void Poll() override {
    if (device_.QueryEvent(event_).value()) completed_ = UINT64_MAX;
  }
  absl::Status Wait(uint64_t, absl::Duration timeout) override {
    ++host_waits_;
    const absl::Status waited = device_.WaitEvent(event_, timeout);
    if (waited.ok()) completed_ = UINT64_MAX;
    return waited;
  }
  absl::Status OrderAfter(uint64_t, EventWaiter& stream) override {
    return stream.WaitForEvent(event_.native());
  }

 private:
  Device& device_;
  const EventHandle event_;
  std::atomic<uint64_t> completed_{0};
  std::atomic<int> host_waits_{0};
};

TEST_F(ForeignTicketsTest, AStreamWaitsForAnEventWithoutTheHost) {
  const std::shared_ptr<Device> device = world_.machine().device(0);
  const StreamHandle own = world_.NewStream();
  uint8_t* const source = world_.AllocateDevice(Pattern(3, kBytes));
  ASSERT_THAT(device->SynchronizeStream(world_.compute()), IsOk());
  // The program itself copies into the buffer.
  const CopyPiece piece = {host_->data(), source, kBytes};
  ASSERT_THAT(device->CopyAsync(CopyDirection::kDeviceToHost, {&piece, 1}, own), IsOk());
  const auto timeline = std::make_shared<EventTimeline>(*device, own);
  host_->AddTicket({timeline, 1});

  const uint64_t waits = world_.engine().GetStats().event_waits;
  EXPECT_EQ(CopyInAndRead(), Pattern(3, kBytes));
  EXPECT_THAT(world_.machine().races(), IsEmpty());
  EXPECT_EQ(timeline->host_waits(), 0);
  EXPECT_EQ(world_.engine().GetStats().event_waits - waits, 3u)
      << "for compute, for the buffer, and compute for the copy";
}

TEST_F(ForeignTicketsTest, ATimeoutNamesTheOtherTimeline) {
  const std::shared_ptr<Device> device = world_.machine().device(0);
  const StreamHandle own = world_.NewStream();
  world_.Jam(own);
  host_->AddTicket({std::make_shared<EventTimeline>(*device, own), 7});
  const Transfer copy = world_.CopyIn(host_, data_);
  EXPECT_THAT(copy.Wait(absl::Seconds(30)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("it waits for number 7 of somebody else's timeline")));
}

}  // namespace
}  // namespace pinion::testing
