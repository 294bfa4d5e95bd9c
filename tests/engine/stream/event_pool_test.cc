#include "pinion/engine/stream/event_pool.h"

#include <memory>

#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/stream/guarded_device.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::internal::EventPool;
using ::pinion::internal::EventRef;
using ::pinion::internal::GuardedDevice;
using ::pinion::testing::ForkInTheMiddleOf;
using ::pinion::testing::IsOk;

class EventPoolTest : public ::testing::Test {
 protected:
  const std::shared_ptr<EmulatedMachine> machine_ =
      EmulatedMachine::Create(testing::TestMachineOptions()).value();
  std::shared_ptr<GuardedDevice> device_ =
      std::make_shared<GuardedDevice>(machine_->device(0), /*transient_retries=*/0);
  std::unique_ptr<EventPool> pool_ = std::make_unique<EventPool>(device_);
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

TEST_F(EventPoolTest, ReferencesOutliveThePoolAndTakeTheDeviceWithThem) {
  EventRef event = pool_->Acquire().value();
  const std::weak_ptr<GuardedDevice> device = device_;
  device_ = nullptr;
  pool_ = nullptr;
  EXPECT_FALSE(device.expired());
  event = EventRef();
  EXPECT_TRUE(device.expired());
}

// docs/processes.md: engines may be destroyed in a child, which waits for nothing.
TEST_F(EventPoolTest, AChildLetsGoOfEventsAndPoolWhateverOthersDidWithThem) {
  EventRef event = pool_->Acquire().value();
  ForkInTheMiddleOf([this] { EXPECT_THAT(pool_->Acquire(), IsOk()); },
                    [&] {
                      event = EventRef();
                      pool_ = nullptr;
                    });
}

}  // namespace
}  // namespace pinion
