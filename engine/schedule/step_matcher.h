// Matches what the running step saves and reads against a cached plan, and tracks how far the step
// has come in it.
//
//   matcher.Begin();
//   const StepMatcher::Saved saved = matcher.OnSaved(signature);
//   if (const auto match = matcher.MatchWith(*cached)) matcher.Follow(cached, *std::move(match));
//   if (!matcher.OnUsed(saved.object, AccessKind::kRead)) ...  // it is another step
//
// Objects have ids here, and other ids in the cached plan. The two orders differ: a branch may be
// left out, or saves may come in another order.
//
// Thread safety: none.

#ifndef PINION_ENGINE_SCHEDULE_STEP_MATCHER_H_
#define PINION_ENGINE_SCHEDULE_STEP_MATCHER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/schedule/plan_cache.h"

namespace pinion {

class StepMatcher {
 public:
  struct Saved {
    uint32_t object = 0;  // its id, until it is released
    bool fits = true;     // false: the followed plan has no such object
  };
  // The step so far, as a part of a cached plan.
  struct Match {
    std::vector<uint32_t> planned;  // ids in the plan, by object
    std::vector<uint32_t> actual;   // objects, by their id in the plan
    size_t now = 0;                 // the access of the plan that was reached
    bool skips = false;             // whether accesses of the plan were left out or reordered
  };

  // A step begins, and follows no plan.
  void Begin();
  // An object was saved. That is no access yet.
  Saved OnSaved(uint64_t signature);
  // Returns false if the followed plan does not match. Either it has no such access now, or it has
  // released an object that this step still needs.
  bool OnUsed(uint32_t object, AccessKind access);
  void OnReleased(uint32_t object);

  // Empty if the step has done something that the plan does not contain.
  std::optional<Match> MatchWith(const CachedPlan& cached) const;
  void Follow(std::shared_ptr<const CachedPlan> cached, Match match);
  void FollowNone();

  // Whether any object is needed.
  bool IsRunning() const { return live_objects_ > 0; }
  // The followed plan, or that of the last step; null without one.
  const std::shared_ptr<const CachedPlan>& followed() const { return followed_; }
  size_t object_count() const { return objects_.size(); }
  // The object of the last access. Its reader is about to read it, unless the access was a save.
  std::optional<uint32_t> used_last() const { return used_last_; }

  // --- while a plan is followed ---

  // The access of the plan that was reached.
  size_t now() const { return match_.now; }
  // Whether accesses of the plan were left out or reordered.
  bool skips() const { return match_.skips; }
  // The object's id in the plan.
  uint32_t planned(uint32_t object) const { return match_.planned[object]; }
  // The object with that id in the plan; empty if it was not saved yet.
  std::optional<uint32_t> ObjectFor(uint32_t planned) const {
    const uint32_t object = match_.actual[planned];
    return object == UINT32_MAX ? std::nullopt : std::make_optional(object);
  }

 private:
  struct Object {
    uint64_t signature = 0;
    size_t accesses = 0;
    size_t saves = 0;     // among the accesses
    bool is_live = true;  // needed
  };

  // Returns the access of the plan that the `n`-th access of the object `planned` is; empty if
  // none. `actual` is as in Match.
  std::optional<size_t> Reached(const CachedPlan& cached, const std::vector<uint32_t>& actual,
                                uint32_t planned, size_t n, AccessKind access, size_t now) const;
  // Whether an object is still needed that the plan no longer needs.
  bool IsOverdue();

  std::vector<Object> objects_;
  std::vector<uint32_t> unused_;                       // free ids
  std::vector<std::pair<uint32_t, AccessKind>> used_;  // with the object, while a plan is followed
  size_t live_objects_ = 0;
  absl::flat_hash_map<uint64_t, size_t> signatures_;  // how often each was saved
  std::optional<uint32_t> used_last_;

  std::shared_ptr<const CachedPlan> followed_;
  Match match_;           // with the followed plan
  size_t next_over_ = 0;  // index in followed_->overs()
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_STEP_MATCHER_H_
