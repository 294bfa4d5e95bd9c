#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/fake_timeline.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;

auto IsTicket(const std::shared_ptr<FakeTimeline>& timeline, uint64_t value) {
  return AllOf(Field(&FenceTicket::timeline, timeline), Field(&FenceTicket::value, value));
}

TEST(HostBufferTest, KeepsTheLatestTicketOfEachTimeline) {
  EngineWorld world;
  const std::shared_ptr<HostBuffer> buffer = world.NewHostBuffer(64);
  const auto a = std::make_shared<FakeTimeline>();
  const auto b = std::make_shared<FakeTimeline>();
  for (const FenceTicket& ticket : {a->Ticket(2), b->Ticket(5), a->Ticket(7), b->Ticket(3)}) {
    buffer->AddTicket(ticket);
  }
  EXPECT_THAT(buffer->tickets(), ElementsAre(IsTicket(a, 7), IsTicket(b, 5)));
  for (const auto& timeline : {a, b}) timeline->CompleteVisibly(9);
}

TEST(HostBufferDeathTest, ABlockThatWasMovedFromIsTheCallersBug) {
  EXPECT_DEATH(HostBuffer{PinnedBlock()}, "was not moved from");
}

}  // namespace
}  // namespace pinion::testing
