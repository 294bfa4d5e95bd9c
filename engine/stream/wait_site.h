// Every wait, by name.
//
// No stream waits for another, and the host for none by itself, except through a site listed here:
// a call site that is not in the list does not compile. Tests disable one site at a time and must
// then see a race, wrong bytes or a broken bound (mutation of synchronisation), so that no wait is
// decoration and none is missing. docs/waits.md says for each what it orders and which tests see it
// missing.

#ifndef PINION_ENGINE_STREAM_WAIT_SITE_H_
#define PINION_ENGINE_STREAM_WAIT_SITE_H_

namespace pinion {

enum class WaitSite {
  // engine
  kCopyAfterCompute,     // a copy starts after the work that its batch was submitted after
  kCopyAfterHostBuffer,  // a copy starts after earlier work on its host buffer: copies of the other
                         // direction, and whatever else has left a ticket there
  kFlowControl,          // the host waits until bytes in flight to the device are below the bound
  kCopyWithoutEvent,     // the host waits for a copy whose event could not be recorded
  kFailedBatch,          // the host waits for the chunks of a batch whose next one has failed
  // hooks
  kEvictAfterCopyOut,    // device memory is dropped after its copy out is done
  kUnpackAfterCopyIn,    // backward reads a fetched tensor after its copy in is done
  kFreeAfterCopy,        // a device buffer under copy is freed after the copy
  kUnpackOnOtherStream,  // backward on another stream than forward waits for forward's work
  kBlockingCopyOut,      // without overlap, the host waits before it drops device memory
};

inline constexpr int kEngineWaitSiteCount = 5;  // the first ones
inline constexpr int kWaitSiteCount = 10;

const char* WaitSiteName(WaitSite site);

// False while a test has disabled `site`. One relaxed load.
bool WaitSiteEnabled(WaitSite site);

// Tests only. Disables `site` process-wide for the lifetime of the object.
class ScopedDisableWaitSite {
 public:
  explicit ScopedDisableWaitSite(WaitSite site);
  ~ScopedDisableWaitSite();
  ScopedDisableWaitSite(const ScopedDisableWaitSite&) = delete;
  ScopedDisableWaitSite& operator=(const ScopedDisableWaitSite&) = delete;

 private:
  WaitSite site_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_STREAM_WAIT_SITE_H_
