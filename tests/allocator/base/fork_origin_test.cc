#include "pinion/allocator/base/fork_origin.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/status_says.h"

namespace pinion {
namespace {

using ::pinion::testing::ChildProcess;
using ::pinion::testing::IsFailedPrecondition;

TEST(ForkOriginTest, WhatAChildInheritsIsNotItsOwnAndWhatItMakesIs) {
  const ForkOrigin parents;
  ChildProcess child([&] {
    EXPECT_TRUE(parents.InForkedChild());
    const ForkOrigin childs;
    EXPECT_FALSE(childs.InForkedChild());
    ChildProcess grandchild([&] {
      EXPECT_TRUE(parents.InForkedChild());
      EXPECT_TRUE(childs.InForkedChild());
    });
    EXPECT_EQ(grandchild.Wait(), 0);
    EXPECT_FALSE(childs.InForkedChild()) << "the child has not forked from itself";
  });
  EXPECT_EQ(child.Wait(), 0);
  EXPECT_FALSE(parents.InForkedChild());
}

TEST(ForkOriginTest, ARefusalNamesTheObjectAndTheRemedy) {
  EXPECT_THAT(ForkOrigin().Refusal("this pool"),
              IsFailedPrecondition("this pool was made before fork()",
                                   "make another one in the child", "spawn"));
}

}  // namespace
}  // namespace pinion
