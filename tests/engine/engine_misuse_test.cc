// Wrong uses of the engine, a row each: an error that names the value, and an engine that goes on.
// tests/misuse.md says which tests have the others.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace engine_misuse_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// Slow copies, so that the engine knows of no completed copy.
EmulatedOptions WithSlowCopies() {
  EmulatedOptions options = TestMachineOptions();
  options.faults.stall_copies_from = 1;
  options.faults.stall_ms = 10;
  return options;
}

class EngineMisuseTest : public ::testing::Test {
 protected:
  EngineWorld world_{WithSlowCopies()};
  TransferEngine& engine_ = world_.engine();
  uint8_t* const data_ = world_.AllocateDevice(kKiB);
  const std::shared_ptr<HostBuffer> host_ = world_.NewHostBuffer(kKiB);
};

TEST_F(EngineMisuseTest, AStreamThatThereIsNotIsRefusedByEachCall) {
  const StreamHandle destroyed = world_.NewStream();
  ASSERT_THAT(engine_.device().DestroyStream(destroyed), IsOk());
  const StreamHandle compute = world_.compute();
  const Transfer pending = world_.CopyIn(host_, data_, compute);
  const struct {
    const char* name;
    std::function<absl::Status(StreamHandle stream)> call;
  } rows[] = {
      {"Submit to the host", [&](auto no) { return world_.TryCopyOut(host_, data_, no).status(); }},
      {"Submit to the device",
       [&](auto no) { return world_.TryCopyIn(host_, data_, no).status(); }},
      {"Mark", [&](auto no) { return engine_.Mark(no).status(); }},
      {"OrderStreams, earlier",
       [&](auto no) { return engine_.OrderStreams(no, compute, kAfterOtherStream); }},
      {"OrderStreams, later",
       [&](auto no) { return engine_.OrderStreams(compute, no, kAfterOtherStream); }},
      {"IsCapturing", [&](auto no) { return engine_.IsCapturing(no).status(); }},
      {"WaitOn", [&](auto no) { return pending.WaitOn(no, kReadAfterCopyIn); }},
  };
  for (const auto& row : rows) {
    EXPECT_THAT(row.call(StreamHandle()),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the handle is empty")))
        << row.name;
    EXPECT_THAT(row.call(destroyed),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("(destroyed?)")))
        << row.name;
  }
  EXPECT_THAT(engine_.OrderStreams({}, {}, kAfterOtherStream),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the handle is empty")));
  EXPECT_THAT(engine_.health(), IsOk());
  ASSERT_THAT(pending.Wait(absl::InfiniteDuration()), IsOk());
  EXPECT_THAT(pending.WaitOn(StreamHandle(), kReadAfterCopyIn), IsOk()) << "nobody is to wait";
}

TEST_F(EngineMisuseTest, ATimeThatHasPassedEndsEachWaitAtOnce) {
  const Transfer pending = world_.CopyIn(host_, data_);
  const auto waits = [&](absl::Duration timeout) {
    return std::vector<absl::Status>{pending.Wait(timeout), engine_.Drain(timeout),
                                     engine_.Shutdown(timeout)};
  };
  const double before_ms = world_.machine().now_ms();
  for (const absl::Duration timeout : {absl::Seconds(-1), -absl::InfiniteDuration()}) {
    for (const absl::Status& waited : waits(timeout)) {
      EXPECT_THAT(waited, StatusIs(absl::StatusCode::kDeadlineExceeded,
                                   HasSubstr("submission 1 (1 KiB, 1 piece) is not done")));
    }
  }
  EXPECT_LT(world_.machine().now_ms() - before_ms, 1);
  ASSERT_THAT(pending.Wait(absl::InfiniteDuration()), IsOk());
  for (const absl::Status& waited : waits(absl::Seconds(-1))) EXPECT_THAT(waited, IsOk());
}

TEST_F(EngineMisuseTest, AnAllocatorWithoutRoomIsNamedByTheCalibration) {
  AllocatorOptions options;
  options.max_locked_bytes = options.segment_bytes = 64 * kKiB;
  const auto allocator =
      PinnedAllocator::Create(options, engine_.device().pinned_source(), FakeHost().Probe())
          .value();
  EXPECT_THAT(engine_.Calibrate(*allocator),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("1 MiB"), HasSubstr("max_locked_bytes, 64 KiB"))));
  EXPECT_THAT(engine_.Calibrate(world_.allocator()), IsOk()) << "it is made again";
}

TEST_F(EngineMisuseTest, ATicketOfNoTimelineIsDone) {
  host_->AddTicket({});
  host_->AddTicket({nullptr, UINT64_MAX});
  ASSERT_THAT(host_->tickets(), SizeIs(1));
  EXPECT_TRUE(host_->tickets()[0].IsDone());
  EXPECT_THAT(world_.CopyOut(host_, data_).Wait(absl::Seconds(1)), IsOk());
}

// A program's own timeline that has no event to wait for.
class TimelineWithoutEvent final : public FenceTimeline {
 public:
  uint64_t Completed() const noexcept override { return 0; }
  void Poll() override {}
  absl::Status Wait(uint64_t, absl::Duration) override { return absl::DataLossError("no event"); }
  absl::Status OrderAfter(uint64_t, EventWaiter& stream) override {
    return stream.WaitForEvent(nullptr);
  }
};

TEST_F(EngineMisuseTest, AnEventThatIsNullIsRefusedAndNothingIsCopied) {
  host_->AddTicket({std::make_shared<TimelineWithoutEvent>(), 1});
  EXPECT_THAT(world_.TryCopyIn(host_, data_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the event handle is empty")));
  EXPECT_EQ(engine_.GetStats().h2d.submitted_chunks, 0u);
  EXPECT_THAT(engine_.health(), IsOk());
}

TEST_F(EngineMisuseTest, ATicketThatNobodyGaveIsNamedAndNothingIsCopied) {
  const FenceTicket given = engine_.Mark(world_.compute()).value();
  const auto refused =
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("a foreign stream on emu:0: nothing with the number 99 was submitted"));
  host_->AddTicket({given.timeline, 99});
  EXPECT_THAT(world_.TryCopyIn(host_, data_), refused);
  EXPECT_EQ(engine_.GetStats().h2d.submitted_chunks, 0u);
  EXPECT_THAT(engine_.health(), IsOk());
  const FenceTicket never_given = {given.timeline, 99};
  EXPECT_THAT(never_given.Wait(absl::InfiniteDuration()), refused);
}

}  // namespace engine_misuse_test
}  // namespace pinion::testing
