// Which objects that rest on the host are on the device, when a program uses them again and again
// in much the same order: the layers of a model, forward and backward, step by step.
//
//   VisitSchedule schedule({.sizes_bytes = {4 << 20, 4 << 20, 4 << 20}, .window_bytes = 8 << 20});
//   Visit visit = schedule.OnUse(0, may_drop);       // object 0 is about to be used
//   ... drop visit.drops, then fetch visit.fetches, the used object first if it was away ...
//
// Objects on the device never exceed the window, unless those that may not be dropped leave no
// room. It may be another one at each use (visit_room.h): then nothing is fetched ahead that would
// have to go where the window is smaller, as it was when the same uses went before.
//
// What comes next is what came next when the same uses went before, longest memory first: neither
// steps nor the turn from forward to backward have to be told. Fetched ahead is what comes next, in
// that order, as far as it fits in the window beside all that is used until then. Dropped is what
// is used last of all (Belady's rule), and for a fetch ahead only what is used after it, so that
// fetching ahead makes no object come late that was there in time. Where nothing is known, as in
// the first step, the object whose use is the longest ago goes.
//
// In a loop over more than the window holds, as in inference, that would fetch every object in
// every round: what comes next always drops what has just been used. Once the same round was seen
// twice, a share of the objects stays therefore, as many as leave room for two others, of which one
// comes while one is used, if that saves copies; they are spread over the round, so that the link
// has time for others while they are used.
//
//   window of 4:   round  0 1 2 3 4 5 6 7 ...     stays  0       4
//                  fetched  1 2 3   5 6 7
//
// Where at least half of the objects can be there beside those two, that may be more copies than
// have to be: room for the one that comes is enough. There, what was spread over the round at first
// moves on, if that saves copies: what comes next is fetched as many uses ahead as lie between one
// that is away and the next on average, rounded up, in place of what was used last. A copy has that
// long then, wherever those that are away lie a little nearer or farther.
//
// Room for the two largest is a great part of the window where these are much larger than others,
// as a language model's embedding and its head are. There, all that are large may stay, so that the
// others alone need room to come and go. Which of these ways a loop runs (visit_loop.h) is found by
// a trial of each, by the bytes that it fetches; and by another trial where the window has changed.
//
// Thread safety: none; its owner's lock guards it.

#ifndef PINION_ENGINE_SCHEDULE_VISIT_SCHEDULE_H_
#define PINION_ENGINE_SCHEDULE_VISIT_SCHEDULE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "pinion/engine/schedule/visit_loop.h"

namespace pinion {

// Objects by number.
struct Visit {
  std::vector<uint32_t> drops;
  std::vector<uint32_t> fetches;
};

struct VisitLimits {
  std::vector<uint64_t> sizes_bytes;  // of each object
  uint64_t window_bytes = 0;          // of all that are on the device
};

class VisitSchedule {
 public:
  explicit VisitSchedule(VisitLimits limits);

  // From the next use on. What is used is there in any case.
  void set_window_bytes(uint64_t window_bytes) { window_bytes_ = window_bytes; }

  // The object is used from now on. All that is asked for counts as done: OnAway takes back what
  // could not be fetched. Nothing is fetched where the object was used last and is here.
  Visit OnUse(uint32_t object, absl::FunctionRef<bool(uint32_t)> may_drop);

  // The use is over. Objects that exceed the window go, this one as well if it must. After its last
  // expected use in a row, its room may go to the next object before that one is used: backward
  // reads a layer's weights early in the layer's time.
  Visit OnUsed(uint32_t object, absl::FunctionRef<bool(uint32_t)> may_drop);

  // The host has changed objects, which are away by now: nothing is fetched ahead of a change that
  // is expected. Asks for what is expected next.
  Visit OnChange(absl::FunctionRef<bool(uint32_t)> may_drop);

  // Of its own accord, or since it could not be fetched, the object is not on the device.
  void OnAway(uint32_t object);

  // It is, whatever was asked for meanwhile: somebody else has fetched it.
  void OnHere(uint32_t object);

  uint64_t here_bytes() const { return here_bytes_; }
  // How often the ways of a loop were tried: rarely while windows go on changing.
  uint64_t trials() const { return trials_.count(); }

 private:
  struct Object {
    uint64_t size_bytes = 0;
    uint64_t last_use = 0;
    bool is_here = false;
    bool stays = false;
    uint64_t next_row = 0;  // which row is expected to be its next uses; kNever
  };

  // A row of uses of one object, or a change.
  struct Row {
    uint32_t object = 0;
    uint32_t uses = 0;
    uint64_t window_bytes = 0;  // at the least
  };

  // The number behind those of objects stands for a change; it is never in use.
  uint32_t change() const { return static_cast<uint32_t>(objects_.size() - 1); }
  void FetchAhead(uint32_t in_use, absl::FunctionRef<bool(uint32_t)> may_drop, Visit& visit);
  void Remember(uint32_t object);
  std::optional<size_t> FindSameUses() const;
  size_t period() const { return history_.size() - 1 - *match_; }
  const Row& ExpectedAt(size_t uses_from_now) const;
  void FindNextRows();
  // Drops until so many bytes more fit. False, with nothing dropped, where that cannot be without
  // an object that is used within `uses_from_now`.
  bool MakeRoom(uint64_t size_bytes, size_t uses_from_now, uint32_t in_use,
                absl::FunctionRef<bool(uint32_t)> may_drop, Visit& visit);
  void ChooseLoop();
  void Begin(VisitLoop loop);
  void SetWhatStays(const std::vector<uint32_t>& objects);
  // Of some rounds of what is expected, within that window.
  uint64_t FetchedBytesIn(const VisitLoop& loop, uint64_t window_bytes) const;

  uint64_t window_bytes_;
  std::vector<Object> objects_;
  std::vector<Row> history_;     // each one another object's than the one before
  uint64_t rows_ = 0;            // from the start, those too that the history has forgotten
  std::optional<size_t> match_;  // where in the history the same was done as just now
  bool is_trial_ = false;        // a copy, which does what is expected and nothing else
  size_t expected_uses_ = 0;     // in a row, up to the last one
  uint64_t stay_bytes_ = 0;      // of objects that stay
  VisitLoop loop_;               // that runs
  VisitLoop::Kind best_ = VisitLoop::Kind::kNoneStays;  // in the last trial
  LoopTrials trials_;
  uint64_t here_bytes_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_VISIT_SCHEDULE_H_
