// Wait sites of tests that use the engine directly. They stand for a user's waits.

#ifndef PINION_TESTS_SUPPORT_TEST_WAITS_H_
#define PINION_TESTS_SUPPORT_TEST_WAITS_H_

#include <array>
#include <string_view>

#include "pinion/engine/stream/wait_site.h"

namespace pinion::testing {

inline constexpr std::array<std::string_view, 3> kTestWaits = {
    "kReuseAfterCopyOut",
    "kReadAfterCopyIn",
    "kAfterOtherStream",
};

inline constexpr WaitSite kReuseAfterCopyOut("kReuseAfterCopyOut", kTestWaits);
inline constexpr WaitSite kReadAfterCopyIn("kReadAfterCopyIn", kTestWaits);
inline constexpr WaitSite kAfterOtherStream("kAfterOtherStream", kTestWaits);

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_TEST_WAITS_H_
