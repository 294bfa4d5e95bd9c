// The waits of all that is in hooks/, by name. Each is declared beside the code that waits
// (pinion/engine/stream/wait_site.h).

#ifndef PINION_HOOKS_WAIT_SITES_H_
#define PINION_HOOKS_WAIT_SITES_H_

#include <array>
#include <string_view>

namespace pinion {

inline constexpr std::array<std::string_view, 6> kHooksWaits = {
    "kUnpackAfterCopyIn",     "kUnpackOnOtherStream", "kBlockingCopyOut",
    "kComputedOnOtherStream", "kWeightAfterCopyIn",   "kWeightUsedOnOtherStream",
};

}  // namespace pinion

#endif  // PINION_HOOKS_WAIT_SITES_H_
