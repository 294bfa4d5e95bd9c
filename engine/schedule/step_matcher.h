// What the step that runs has saved and read so far, and where it is in the known step that it goes
// on as.
//
//   progress.Begin();
//   const StepMatcher::Saved saved = progress.OnSaved(signature);
//   if (const auto match = progress.MatchWith(*known)) progress.Follow(known, *std::move(match));
//   if (!progress.OnUsed(saved.object, AccessKind::kRead)) ...  // it is another step: follow that
//   one
//
// Objects have numbers of their own, beside those that the known step has for them: what a branch
// leaves out never comes, and the rest comes in its own order.
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
#include "pinion/engine/schedule/cached_plan.h"
#include "pinion/engine/schedule/offload_schedule.h"

namespace pinion {

class StepMatcher {
 public:
  struct Saved {
    uint32_t object = 0;  // its number, until it is released
    bool fits = true;     // false: the step that is followed has no such object
  };
  // What the step has done so far, as a part of a known one.
  struct Match {
    std::vector<uint32_t> planned;  // by object
    std::vector<uint32_t> actual;   // objects by their number in the known step
    size_t now = 0;                 // the use that was reached
    bool skips = false;             // uses of the known one, or comes to them in another order
  };

  // A step begins, and follows none.
  void Begin();
  // An object more. It counts as no use yet.
  Saved OnSaved(uint64_t signature);
  // False if the step that is followed does not use the object now, or has let go by now of one
  // that somebody needs.
  bool OnUsed(uint32_t object, AccessKind access);
  void OnReleased(uint32_t object);

  // Nothing if the step has done what the known one does not.
  std::optional<Match> MatchWith(const CachedPlan& cached) const;
  void Follow(std::shared_ptr<const CachedPlan> cached, Match match);
  void FollowNone();

  // Somebody needs an object.
  bool IsRunning() const { return live_objects_ > 0; }
  // Whom the step follows, or the last one did until it ended; null: nobody.
  const std::shared_ptr<const CachedPlan>& followed() const { return followed_; }
  size_t object_count() const { return objects_.size(); }
  // The object that was used last, whose reader is about to read it unless that was a save.
  std::optional<uint32_t> used_last() const { return used_last_; }

  // --- while a step is followed ---

  // The use of the known step that was reached.
  size_t now() const { return now_; }
  // Uses of the known step were left out, or came in another order.
  bool skips() const { return skips_; }
  // The object's number in the known step.
  uint32_t planned(uint32_t object) const { return objects_[object].planned; }
  // The object that has that number; none if it has not come yet.
  std::optional<uint32_t> ObjectFor(uint32_t planned) const {
    const uint32_t object = actual_[planned];
    return object == UINT32_MAX ? std::nullopt : std::make_optional(object);
  }

 private:
  struct Object {
    uint64_t signature = 0;
    size_t accesses = 0;
    size_t saves = 0;  // among them
    uint32_t planned = 0;
    bool is_live = true;  // somebody needs it
  };

  // Which use of the known step that one of a `planned` object is, its `n`-th; none if it is none
  // of its. `actual` is as in Match.
  std::optional<size_t> Reached(const CachedPlan& cached, const std::vector<uint32_t>& actual,
                                uint32_t planned, size_t n, AccessKind access, size_t now) const;
  // Something is still needed that the known step has let go of by now.
  bool IsOverdue();

  std::vector<Object> objects_;
  std::vector<uint32_t> unused_;                       // of these, that can be given out again
  std::vector<std::pair<uint32_t, AccessKind>> used_;  // objects, while a step is followed
  size_t live_objects_ = 0;
  absl::flat_hash_map<uint64_t, size_t> signatures_;  // how often each has come
  std::optional<uint32_t> used_last_;

  std::shared_ptr<const CachedPlan> followed_;
  std::vector<uint32_t> actual_;  // objects by their number in the known step
  size_t now_ = 0;
  bool skips_ = false;
  size_t next_over_ = 0;  // in followed_->overs()
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_STEP_MATCHER_H_
