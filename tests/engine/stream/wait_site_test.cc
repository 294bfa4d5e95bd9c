#include "pinion/engine/stream/wait_site.h"

#include <set>
#include <string>

#include "gtest/gtest.h"

namespace pinion {
namespace {

TEST(WaitSiteTest, EverySiteHasANameOfItsOwnAndIsEnabled) {
  std::set<std::string> names;
  for (int i = 0; i < kWaitSiteCount; ++i) {
    const WaitSite site = static_cast<WaitSite>(i);
    names.insert(WaitSiteName(site));
    EXPECT_TRUE(WaitSiteEnabled(site));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(kWaitSiteCount));
}

TEST(WaitSiteTest, OneSiteIsDisabledAsLongAsAnyScopeLives) {
  {
    ScopedDisableWaitSite outer(WaitSite::kFlowControl);
    { ScopedDisableWaitSite inner(WaitSite::kFlowControl); }
    EXPECT_FALSE(WaitSiteEnabled(WaitSite::kFlowControl));
    EXPECT_TRUE(WaitSiteEnabled(WaitSite::kCopyAfterCompute));
  }
  EXPECT_TRUE(WaitSiteEnabled(WaitSite::kFlowControl));
}

TEST(WaitSiteDeathTest, ANumberThatNoSiteHasIsTheCallersBug) {
  EXPECT_DEATH(WaitSiteName(static_cast<WaitSite>(kWaitSiteCount)), "no wait site has the number");
}

}  // namespace
}  // namespace pinion
