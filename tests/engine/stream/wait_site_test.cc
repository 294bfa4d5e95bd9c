#include "pinion/engine/stream/wait_site.h"

#include <array>
#include <string_view>
#include <type_traits>

#include "gtest/gtest.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace {

TEST(WaitSiteTest, ASiteHasItsNameAndIsEnabled) {
  EXPECT_STREQ(kReadAfterCopyIn.name(), "kReadAfterCopyIn");
  EXPECT_TRUE(kReadAfterCopyIn.enabled());
}

TEST(WaitSiteTest, OneSiteIsDisabledAsLongAsAnyScopeLives) {
  {
    ScopedDisableWaitSite outer(kReadAfterCopyIn);
    { ScopedDisableWaitSite inner(kReadAfterCopyIn); }
    EXPECT_FALSE(kReadAfterCopyIn.enabled());
    EXPECT_TRUE(kReuseAfterCopyOut.enabled());
  }
  EXPECT_TRUE(kReadAfterCopyIn.enabled());
}

// A site whose name is in no list does not compile.
template <const auto& list>
concept ListHasSite = requires {
  typename std::bool_constant<(WaitSite("kNowhere", list), true)>;
};
inline constexpr std::array<std::string_view, 1> kNowhere = {"kNowhere"};
static_assert(ListHasSite<kNowhere>);
static_assert(!ListHasSite<kTestWaits>);

}  // namespace
}  // namespace pinion::testing
