#include "pinion/engine/stream/event_pool.h"

#include <array>
#include <memory>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/stream/guarded_device.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::pinion::internal::EventPool;
using ::pinion::internal::EventRef;
using ::pinion::internal::GuardedDevice;

class EventPoolTest : public ::testing::Test {
 protected:
  // Replaces the pool by one whose device fails to create the second event.
  void FailTheSecondEvent() {
    EmulatedOptions options = TestMachineOptions();
    options.faults.calls = {{.call = DeviceCall::kCreateEvent, .at = 2}};
    device_ = std::make_shared<GuardedDevice>(EmulatedMachine::Create(options).value()->device(0),
                                              /*transient_retries=*/0);
    pool_ = std::make_shared<EventPool>(device_);
  }

  const std::shared_ptr<EmulatedMachine> machine_ =
      EmulatedMachine::Create(TestMachineOptions()).value();
  std::shared_ptr<GuardedDevice> device_ =
      std::make_shared<GuardedDevice>(machine_->device(0), /*transient_retries=*/0);
  std::shared_ptr<EventPool> pool_ = std::make_shared<EventPool>(device_);
};

TEST_F(EventPoolTest, AnEventIsUsedAgainOnceNobodyRefersToIt) {
  EventRef first = pool_->Acquire().value();
  const EventRef second = pool_->Acquire().value();
  const EventHandle handle = first->handle();
  EXPECT_NE(second->handle(), handle);
  EventRef more = first;
  first = EventRef();
  EXPECT_NE(pool_->Acquire().value()->handle(), handle);
  more = EventRef();
  EXPECT_EQ(pool_->Acquire().value()->handle(), handle);
}

TEST_F(EventPoolTest, SeveralAreAcquiredAndLetGoOfTogether) {
  std::array<EventRef, 3> events;
  ASSERT_THAT(pool_->Acquire(absl::MakeSpan(events).first(2)), IsOk());
  const EventHandle first = events[0]->handle();
  const EventHandle second = events[1]->handle();
  EXPECT_NE(first, second);
  EventRef more = events[0];
  EventRef::LetGoOf(absl::MakeSpan(events));  // the last one is empty
  EXPECT_TRUE(events[0] == nullptr && events[1] == nullptr);
  ASSERT_THAT(pool_->Acquire(absl::MakeSpan(events).first(2)), IsOk());
  EXPECT_EQ(events[0]->handle(), second);
  EXPECT_NE(events[1]->handle(), first) << "somebody refers to it";
}

TEST_F(EventPoolTest, WhereOneCannotBeMadeNoneIsAcquired) {
  FailTheSecondEvent();
  std::array<EventRef, 2> events;
  EXPECT_FALSE(pool_->Acquire(absl::MakeSpan(events)).ok());
  EXPECT_TRUE(events[0] == nullptr && events[1] == nullptr);
  EXPECT_THAT(pool_->Acquire(absl::MakeSpan(events)), IsOk());
  EventRef::LetGoOf(absl::MakeSpan(events));
  const std::weak_ptr<GuardedDevice> device = device_;
  device_ = nullptr;
  pool_ = nullptr;
  EXPECT_TRUE(device.expired()) << "the pool believes that an event is in use";
}

TEST_F(EventPoolTest, WhereOneCannotBeMadeThoseThatWereFreeStayFree) {
  FailTheSecondEvent();
  const EventHandle free = pool_->Acquire().value()->handle();
  std::array<EventRef, 2> events;
  EXPECT_FALSE(pool_->Acquire(absl::MakeSpan(events)).ok());
  EXPECT_EQ(pool_->Acquire().value()->handle(), free);
}

TEST_F(EventPoolTest, ReferencesOutliveThePoolAndTakeTheDeviceWithThem) {
  EventRef event = pool_->Acquire().value();
  const std::weak_ptr<GuardedDevice> device = device_;
  device_ = nullptr;
  pool_ = nullptr;
  EXPECT_FALSE(device.expired());
  event = EventRef();
  EXPECT_TRUE(device.expired());
}

// docs/users/allocator.md: engines may be destroyed in a child, which waits for nothing.
TEST_F(EventPoolTest, AChildLetsGoOfEventsAndPoolWhateverOthersDidWithThem) {
  EventRef event = pool_->Acquire().value();
  ForkInTheMiddleOf([this] { EXPECT_THAT(pool_->Acquire(), IsOk()); },
                    [&] {
                      event = EventRef();
                      pool_ = nullptr;
                    });
}

}  // namespace
}  // namespace pinion::testing
