// Gives a wait a name, so that tests can disable it and must then see a race.
//
//   // In the header of the waiting code; kEngineWaits lists the layer's names.
//   inline constexpr WaitSite kFailedBatch("kFailedBatch", kEngineWaits);
//   ...
//   if (kFailedBatch.enabled()) ... wait ...
//
// Every wait between streams, and every wait of the host for a stream, has a site beside its code.
// A layer lists the names of its sites; a site outside the list does not compile. Tests read the
// lists and disable one site at a time. They must then see a race or wrong bytes: this proves that
// each wait is needed. tests/hooks/wait_sites.md says what each site orders.
//
// Thread safety: thread-safe.

#ifndef PINION_ENGINE_STREAM_WAIT_SITE_H_
#define PINION_ENGINE_STREAM_WAIT_SITE_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <string_view>

namespace pinion {

// The engine's sites.
inline constexpr std::array<std::string_view, 6> kEngineWaits = {
    "kCopyAfterCompute", "kCopyAfterHostBuffer", "kCopyWithoutEvent",
    "kFailedBatch",      "kEvictAfterCopyOut",   "kFreeAfterCopy",
};

// Declare sites at namespace scope: waiting code may keep their addresses.
class WaitSite {
 public:
  // `name` is a literal and one of `listed`.
  template <size_t n>
  consteval WaitSite(const char* name, const std::array<std::string_view, n>& listed)
      : name_(name) {
    if (std::find(listed.begin(), listed.end(), name) == listed.end()) TheListHasNoSuchSite();
  }
  WaitSite(const WaitSite&) = delete;
  WaitSite& operator=(const WaitSite&) = delete;

  const char* name() const { return name_; }

  // Returns false while a test has disabled the site. Costs one relaxed load.
  bool enabled() const { return disabled_.load(std::memory_order_relaxed) == 0; }

 private:
  friend class ScopedDisableWaitSite;

  // Not constexpr: a call ends the compilation.
  static void TheListHasNoSuchSite() {}

  const char* name_;
  // Number of ScopedDisableWaitSite objects that disable the site.
  mutable std::atomic<int> disabled_ = 0;
};

// Tests only: disables `site` process-wide while the object lives.
class [[nodiscard]] ScopedDisableWaitSite {
 public:
  [[nodiscard]] explicit ScopedDisableWaitSite(const WaitSite& site) : site_(site) {
    site_.disabled_.fetch_add(1, std::memory_order_relaxed);
  }
  ~ScopedDisableWaitSite() { site_.disabled_.fetch_sub(1, std::memory_order_relaxed); }
  ScopedDisableWaitSite(const ScopedDisableWaitSite&) = delete;
  ScopedDisableWaitSite& operator=(const ScopedDisableWaitSite&) = delete;

 private:
  const WaitSite& site_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_STREAM_WAIT_SITE_H_
