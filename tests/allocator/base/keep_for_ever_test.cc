#include "pinion/allocator/base/keep_for_ever.h"

#include <memory>

#include "gtest/gtest.h"

namespace pinion {
namespace {

TEST(KeepForEverTest, WhatIsKeptIsNotDestroyed) {
  const auto object = std::make_shared<int>(7);
  KeepForEver(object);
  KeepForEver(object);
  EXPECT_EQ(object.use_count(), 3);
}

}  // namespace
}  // namespace pinion
