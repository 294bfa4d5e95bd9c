// Random operations on an OffloadSchedule; a model recomputes all sums after each of them.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/schedule/back_off.h"
#include "pinion/engine/schedule/offload_schedule.h"

namespace pinion {
namespace {

constexpr int kSteps = 2000;
constexpr int64_t kBackwards = 3;  // -1, 0 and 1

struct ModelParcel : ScheduledParcel {
  std::vector<HeldBytes> pieces;  // while in the window
  bool in_window = false;
  bool known = true;
  uint64_t held_bytes = 0;
  uint64_t window_bytes = 0;
  bool on_device = false;  // fetched, or about to be
  bool ahead = false;
  uint64_t ahead_bytes = 0;
};

class Simulation {
 public:
  Simulation(const WindowOptions& options, uint64_t seed)
      : options_(options), random_(seed), schedule_(options) {
    for (HeldBytes& memory : memory_) memory = {&memory, 1 + Below(60)};
  }

  void Step() {
    const uint64_t what = Below(100);
    if (what < 30) {
      Leave();
    } else if (what < 38) {
      PieceGone();
    } else if (what < 45) {
      Gone();
    } else if (what < 55) {
      Evict(/*all=*/Below(8) == 0);
    } else if (what < 80) {
      Fetch();
    } else if (what < 90) {
      Read();
    } else if (what < 95) {
      BeginOrEndBackward();
    } else if (what < 98) {
      WantRoom();
    } else {
      schedule_.OnScopeEnd(scope_);
      if (saved_.total_bytes() > 0) last_scope_ = std::exchange(saved_, ScopeSizes());
      ++scope_;
    }
  }

  void Check() {
    AddUp();
    std::vector<ScheduledParcel*> ahead;
    for (ModelParcel& parcel : parcels_) {
      const uint64_t which = parcel.place.sequence;
      ASSERT_EQ(parcel.scheduled.in_window, parcel.in_window) << "parcel " << which;
      ASSERT_EQ(parcel.scheduled.held_bytes, parcel.held_bytes) << "parcel " << which;
      ASSERT_EQ(parcel.scheduled.window_bytes, parcel.window_bytes) << "parcel " << which;
      if (parcel.ahead) ahead.push_back(&parcel);
    }
    ASSERT_THAT(schedule_.FetchedAhead(), ::testing::ElementsAreArray(ahead));
  }

  // Guards against runs in which nothing happens.
  uint64_t evicted = 0, fetched = 0, compared = 0, refused = 0, handed_over = 0;

 private:
  uint64_t Below(uint64_t limit) { return random_() % limit; }
  bool Auto() const { return options_.eviction_bytes == WindowOptions::kAuto; }
  uint64_t Window(uint64_t option) const {
    if (option != WindowOptions::kAuto) return option;
    return std::max(AutoWindowBytes(saved_, last_scope_), AutoWindowBytes({}, last_scope_));
  }
  uint64_t Share(uint64_t option, uint64_t size_bytes) const {
    return Auto() ? std::min(size_bytes, Window(option) / 2) : size_bytes;
  }
  // Mostly one of the parcels that were offloaded last, because these share memory.
  ModelParcel* AnyKnown() {
    std::vector<ModelParcel*> known;
    for (auto it = parcels_.rbegin(); it != parcels_.rend(); ++it) {
      if (it->known) known.push_back(&*it);
    }
    if (known.empty()) return nullptr;
    return known[Below(Below(4) == 0 ? known.size() : std::min<uint64_t>(known.size(), 10))];
  }

  // Shared memory counts for the parcel that was offloaded last. A parcel's share of the window is
  // computed anew when its bytes change.
  void AddUp() {
    std::map<const void*, const ModelParcel*> last;
    for (const ModelParcel& parcel : parcels_) {
      for (const HeldBytes& piece : parcel.pieces) last[piece.owner] = &parcel;
    }
    for (ModelParcel& parcel : parcels_) {
      uint64_t held_bytes = 0;
      std::set<const void*> counted;
      for (const HeldBytes& piece : parcel.pieces) {
        if (last[piece.owner] != &parcel || !counted.insert(piece.owner).second) continue;
        held_bytes += piece.size_bytes;
      }
      if (held_bytes == parcel.held_bytes) continue;
      if (held_bytes > parcel.held_bytes && parcel.place.sequence < last_sequence_) ++handed_over;
      parcel.held_bytes = held_bytes;
      parcel.window_bytes = Share(options_.eviction_bytes, held_bytes);
    }
  }
  uint64_t AheadBytes() const {
    uint64_t bytes = 0;
    for (const ModelParcel& parcel : parcels_) bytes += parcel.ahead ? parcel.ahead_bytes : 0;
    return bytes;
  }
  static void LeaveWindow(ModelParcel& parcel) {
    parcel.pieces.clear();
    parcel.in_window = false;
  }

  void Leave() {
    ModelParcel& parcel = parcels_.emplace_back();
    parcel.place = {scope_, ++last_sequence_};
    parcel.size_bytes = Below(20) == 0 ? 300 : 1 + Below(40);
    parcel.stream = Below(8) == 0;
    schedule_.OnSaved(scope_, {parcel.size_bytes});
    saved_.Add(parcel.size_bytes);
    std::vector<HeldBytes> held;
    for (uint64_t pieces = Below(4); pieces > 0; --pieces) {
      held.push_back(memory_[Below(memory_.size())]);
    }
    parcel.pieces = held;
    // A resize changes what the next parcel with this memory holds.
    if (Below(4) == 0) memory_[Below(memory_.size())].size_bytes = 1 + Below(60);
    parcel.in_window = !held.empty();
    schedule_.OnLeft(parcel, held);
  }

  void PieceGone() {
    ModelParcel* const parcel = AnyKnown();
    if (parcel == nullptr) return;
    const HeldBytes& gone = memory_[Below(memory_.size())];
    const auto found =
        std::find_if(parcel->pieces.begin(), parcel->pieces.end(),
                     [&](const HeldBytes& piece) { return piece.owner == gone.owner; });
    if (found != parcel->pieces.end()) parcel->pieces.erase(found);
    schedule_.OnPieceGone(*parcel, gone.owner);
  }

  void Gone() {
    ModelParcel* const parcel = AnyKnown();
    if (parcel == nullptr) return;
    parcel->known = false;
    LeaveWindow(*parcel);
    EXPECT_EQ(schedule_.OnGone(*parcel), std::exchange(parcel->ahead, false));
  }

  void Evict(bool all) {
    const uint64_t limit_bytes = all ? 0 : Window(options_.eviction_bytes);
    ScheduledParcels expected;
    for (ModelParcel& oldest : parcels_) {
      if (!oldest.in_window) continue;
      uint64_t held_bytes = 0;
      for (const ModelParcel& parcel : parcels_) held_bytes += parcel.window_bytes;
      if (held_bytes <= limit_bytes) break;
      LeaveWindow(oldest);
      AddUp();
      expected.push_back(&oldest);
    }
    evicted += expected.size();
    EXPECT_EQ(all ? schedule_.TakeAllEvictions() : schedule_.TakeEvictions(), expected);
  }

  bool IsAway(const ModelParcel& parcel) const { return !parcel.in_window && !parcel.on_device; }

  // Returns the batch for a backward that has examined nothing yet.
  ScheduledParcels ScanFrom(const SavedPlace& from, int64_t backward) {
    ScheduledParcels batch;
    uint64_t batch_bytes = 0;
    uint64_t ahead_bytes = AheadBytes();
    for (auto it = parcels_.rbegin(); it != parcels_.rend(); ++it) {
      ModelParcel& parcel = *it;
      if (!parcel.known || parcel.place.scope != from.scope || parcel.place >= from) continue;
      if (!IsAway(parcel)) continue;
      if (backward != -1 && parcel.scheduled.fetched_in == backward) continue;
      const uint64_t share_bytes = Share(options_.prefetch_bytes, parcel.size_bytes);
      if (!batch.empty() && parcel.stream != batch.front()->stream) break;
      if (!batch.empty() && batch_bytes + parcel.size_bytes > schedule_.BatchBytes()) break;
      if (ahead_bytes > 0 && ahead_bytes + share_bytes > Window(options_.prefetch_bytes)) break;
      batch.push_back(&parcel);
      batch_bytes += parcel.size_bytes;
      ahead_bytes += share_bytes;
    }
    return batch;
  }

  void Fetch() {
    const ModelParcel* const reads = AnyKnown();
    if (reads == nullptr) return;
    const SavedPlace from = reads->place;
    const auto backward = static_cast<int64_t>(Below(kBackwards)) - 1;
    const bool may_try = back_off_.MayTry();
    const ScheduledParcels scan = ScanFrom(from, backward);
    const bool fresh = may_try && looked_.insert(backward).second;
    const ScheduledParcels taken =
        schedule_
            .TakeFetches(from, backward,
                         [this](const ScheduledParcel& parcel) {
                           return IsAway(static_cast<const ModelParcel&>(parcel));
                         })
            .parcels;
    EXPECT_TRUE(may_try || taken.empty());
    if (fresh) {
      EXPECT_EQ(taken, scan);
      ++compared;
    }
    CheckBatch(taken, from, backward);
    if (taken.empty()) return;
    const bool refuse = Below(8) == 0;
    for (ScheduledParcel* scheduled : taken) {
      auto& parcel = static_cast<ModelParcel&>(*scheduled);
      if (!refuse) {
        parcel.on_device = parcel.ahead = true;
        parcel.ahead_bytes = Share(options_.prefetch_bytes, parcel.size_bytes);
        schedule_.OnFetched(parcel, backward);
      }
    }
    if (refuse) {
      ++refused;
      schedule_.OnFetchesRefused(taken);
      back_off_.Refused();
      looked_.clear();
    } else {
      fetched += taken.size();
      schedule_.OnFetchesMade(/*room_was_made=*/false);
      back_off_.Worked();
    }
  }

  // Checks what every batch must satisfy, whatever was examined before.
  void CheckBatch(const ScheduledParcels& batch, const SavedPlace& from, int64_t backward) {
    uint64_t batch_bytes = 0;
    uint64_t ahead_bytes = AheadBytes();
    SavedPlace before = from;
    for (const ScheduledParcel* scheduled : batch) {
      const auto& parcel = static_cast<const ModelParcel&>(*scheduled);
      EXPECT_TRUE(parcel.known && IsAway(parcel));
      EXPECT_TRUE(backward == -1 || parcel.scheduled.fetched_in != backward);
      EXPECT_EQ(parcel.place.scope, from.scope);
      EXPECT_LT(parcel.place, std::exchange(before, parcel.place)) << "newest first";
      EXPECT_EQ(parcel.stream, batch.front()->stream);
      const uint64_t share_bytes = Share(options_.prefetch_bytes, parcel.size_bytes);
      EXPECT_TRUE(ahead_bytes == 0 || ahead_bytes + share_bytes <= Window(options_.prefetch_bytes));
      ahead_bytes += share_bytes;
      batch_bytes += parcel.size_bytes;
    }
    EXPECT_TRUE(batch.size() < 2 || batch_bytes <= schedule_.BatchBytes());
  }

  void Read() {
    ModelParcel* const parcel = AnyKnown();
    if (parcel == nullptr || !parcel->on_device) return;
    const bool was_ahead = std::exchange(parcel->ahead, false);
    const bool last_reader = Below(2) == 0;
    EXPECT_EQ(last_reader ? schedule_.OnDropped(*parcel) : schedule_.OnRead(*parcel), was_ahead);
    if (last_reader) parcel->on_device = false;
  }

  void BeginOrEndBackward() {
    const auto backward = static_cast<int64_t>(Below(kBackwards)) - 1;
    if (running_.contains(backward)) {
      running_.erase(backward);
      schedule_.OnBackwardEnd(backward);
      looked_.erase(backward);
    } else {
      running_.insert(backward);
      schedule_.OnBackwardBegin(backward);
      back_off_ = BackOff();
    }
  }

  void WantRoom() {
    schedule_.OnRoomWanted();
    looked_.clear();
    for (ModelParcel& parcel : parcels_) {
      if (!std::exchange(parcel.ahead, false)) continue;
      parcel.on_device = false;
      EXPECT_EQ(parcel.scheduled.fetched_in, -1);
      EXPECT_TRUE(schedule_.OnDropped(parcel));
    }
  }

  const WindowOptions options_;
  std::mt19937_64 random_;
  OffloadSchedule schedule_;
  BackOff back_off_;
  std::vector<HeldBytes> memory_ = std::vector<HeldBytes>(10);  // shared by parcels
  std::deque<ModelParcel> parcels_;  // in the order of offloading, including freed ones
  uint64_t last_sequence_ = 0;
  ScopeId scope_ = 1;
  ScopeSizes saved_, last_scope_;
  std::set<int64_t> running_;
  std::set<int64_t> looked_;  // backwards that examined something since their reset
};

class WindowScheduleModelTest : public ::testing::TestWithParam<uint64_t> {};

INSTANTIATE_TEST_SUITE_P(Seeds, WindowScheduleModelTest,
                         ::testing::Range(uint64_t{1}, uint64_t{9}));

TEST_P(WindowScheduleModelTest, TheBooksAreWhatAddingUpGives) {
  const uint64_t seed = GetParam();
  for (const uint64_t window_bytes : {uint64_t{150}, WindowOptions::kAuto}) {
    Simulation simulation(
        {.eviction_bytes = window_bytes, .prefetch_bytes = window_bytes, .full_batch_bytes = 50},
        seed);
    for (int step = 0; step < kSteps && !HasFailure(); ++step) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", step " + std::to_string(step));
      simulation.Step();
      simulation.Check();
    }
    EXPECT_GT(simulation.evicted, 50u);
    EXPECT_GT(simulation.fetched, 25u);
    EXPECT_GT(simulation.compared, 25u);
    EXPECT_GT(simulation.refused, 2u);
    EXPECT_GT(simulation.handed_over, 5u);
  }
}

}  // namespace
}  // namespace pinion
