#include "pinion/allocator/base/fork_origin.h"

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::ChildProcess;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

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
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("this pool was made before fork()"),
                             HasSubstr("make another one in the child"), HasSubstr("spawn"))));
}

}  // namespace
}  // namespace pinion
