#include "pinion/device/emulated/handle_table.h"

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::StatusIs;
using ::testing::HasSubstr;

class HandleTableTest : public ::testing::Test {
 protected:
  HandleTable table_;
  const StreamHandle stream_ = table_.Add({.device = 1, .slot = 7, .name = "emu:1/d2h"});
  const EventHandle event_ = table_.Add(HandleTable::Event{.device = 1});
};

TEST_F(HandleTableTest, AStreamIsFoundByItsHandle) {
  EXPECT_EQ(table_.Find(1, stream_).value()->slot, 7);
  EXPECT_EQ(table_.FindOnAnyDevice(stream_)->name, "emu:1/d2h");
}

TEST_F(HandleTableTest, WhatAStreamSaysOfItselfStays) {
  table_.FindOnAnyDevice(stream_)->capturing = true;
  table_.Add({.device = 0, .slot = 8, .name = "another"});
  EXPECT_TRUE(table_.Find(1, stream_).value()->capturing);
}

TEST_F(HandleTableTest, AStreamOfAnotherDeviceIsRefusedByName) {
  EXPECT_THAT(table_.Find(0, stream_), StatusIs(absl::StatusCode::kInvalidArgument,
                                                HasSubstr("emu:1/d2h was used with device emu:0")));
}

TEST_F(HandleTableTest, AStreamThatWasRemovedIsNotFound) {
  table_.Remove(stream_);
  EXPECT_THAT(table_.Find(1, stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("destroyed?")));
  EXPECT_EQ(table_.FindOnAnyDevice(stream_), nullptr);
}

TEST_F(HandleTableTest, AnEventIsFoundUntilItIsRemoved) {
  EXPECT_EQ(table_.Find(event_).value()->device, 1);
  table_.Remove(event_);
  EXPECT_THAT(table_.Find(event_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("destroyed?")));
}

TEST_F(HandleTableTest, EmptyHandlesAreRefusedAsSuch) {
  EXPECT_THAT(table_.Find(1, StreamHandle()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the handle is empty")));
  EXPECT_THAT(table_.Find(EventHandle()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the event handle is empty")));
}

}  // namespace
}  // namespace pinion
