#include "pinion/engine/stream/wait_site.h"

#include <array>
#include <atomic>

#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

// How many ScopedDisableWaitSite objects hold each site down.
std::array<std::atomic<int>, kWaitSiteCount> disabled{};

std::atomic<int>& DisabledCount(WaitSite site) { return disabled[static_cast<int>(site)]; }

}  // namespace

const char* WaitSiteName(WaitSite site) {
  switch (site) {
    case WaitSite::kCopyAfterCompute:
      return "kCopyAfterCompute";
    case WaitSite::kCopyAfterHostBuffer:
      return "kCopyAfterHostBuffer";
    case WaitSite::kFlowControl:
      return "kFlowControl";
    case WaitSite::kCopyWithoutEvent:
      return "kCopyWithoutEvent";
    case WaitSite::kFailedBatch:
      return "kFailedBatch";
    case WaitSite::kEvictAfterCopyOut:
      return "kEvictAfterCopyOut";
    case WaitSite::kUnpackAfterCopyIn:
      return "kUnpackAfterCopyIn";
    case WaitSite::kFreeAfterCopy:
      return "kFreeAfterCopy";
    case WaitSite::kUnpackOnOtherStream:
      return "kUnpackOnOtherStream";
    case WaitSite::kBlockingCopyOut:
      return "kBlockingCopyOut";
  }
  PINION_CHECK(false) << "no wait site has the number " << static_cast<int>(site);
  return "";
}

bool WaitSiteEnabled(WaitSite site) {
  return DisabledCount(site).load(std::memory_order_relaxed) == 0;
}

ScopedDisableWaitSite::ScopedDisableWaitSite(WaitSite site) : site_(site) {
  DisabledCount(site_).fetch_add(1, std::memory_order_relaxed);
}

ScopedDisableWaitSite::~ScopedDisableWaitSite() {
  DisabledCount(site_).fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace pinion
