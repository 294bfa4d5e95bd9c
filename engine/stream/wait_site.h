// A wait, by name.
//
//   // In the header of what waits; "kFlowControl" stands in the list of the layer, kEngineWaits.
//   inline constexpr WaitSite kFlowControl("kFlowControl", kEngineWaits);
//   ...
//   if (kFlowControl.enabled()) ... wait ...
//
// No stream waits for another, and the host for none by itself, except at a site that is declared
// beside the code that waits. A layer lists the names of its sites; a site that its list does not
// name does not compile. Tests read the lists: they disable one site at a time and must then see a
// race, wrong bytes or a broken bound (mutation of synchronisation), so that no wait is decoration
// and none is missing. tests/hooks/wait_sites.md lists what each site orders and its tests.
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

// Of the engine.
inline constexpr std::array<std::string_view, 7> kEngineWaits = {
    "kCopyAfterCompute", "kCopyAfterHostBuffer", "kCopyWithoutEvent", "kFlowControl",
    "kFailedBatch",      "kEvictAfterCopyOut",   "kFreeAfterCopy",
};

// Declared at namespace scope: whoever waits may keep its address.
class WaitSite {
 public:
  // `name` is one of `listed`, and a literal.
  template <size_t n>
  consteval WaitSite(const char* name, const std::array<std::string_view, n>& listed)
      : name_(name) {
    if (std::find(listed.begin(), listed.end(), name) == listed.end()) TheListHasNoSuchSite();
  }
  WaitSite(const WaitSite&) = delete;
  WaitSite& operator=(const WaitSite&) = delete;

  const char* name() const { return name_; }

  // False while a test has disabled the site. One relaxed load.
  bool enabled() const { return disabled_.load(std::memory_order_relaxed) == 0; }

 private:
  friend class ScopedDisableWaitSite;

  // Not constexpr: a call ends the compilation.
  static void TheListHasNoSuchSite() {}

  const char* name_;
  // How many ScopedDisableWaitSite objects hold the site down.
  mutable std::atomic<int> disabled_ = 0;
};

// Tests only. Disables `site` process-wide for the lifetime of the object.
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
