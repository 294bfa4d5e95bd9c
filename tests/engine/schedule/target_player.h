// Plays a step's saves and reads against a PlannedSchedule, as whoever offloads does. The player
// does at once what the schedule asks for. Each action returns the log of what it caused.
//
//   TargetPlayer player(schedule);
//   player.Save(/*signature=*/7);
//   EXPECT_THAT(player.EndForward(), ElementsAre("out 0", "drop 0"));
//   EXPECT_THAT(player.Read(0), ElementsAre("demand 0"));
//
// Log entries: "stay i" (remains resident), "out i" (copy out submitted), "drop i" (evicted),
// "fetch i" (prefetched), "demand i" (fetched by its reader), "compute i" (recomputed by its
// reader).

#ifndef PINION_TESTS_ENGINE_SCHEDULE_TARGET_PLAYER_H_
#define PINION_TESTS_ENGINE_SCHEDULE_TARGET_PLAYER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/schedule/plan_cache.h"
#include "pinion/engine/schedule/planned_schedule.h"

namespace pinion::testing {

class TargetPlayer {
 public:
  using Log = std::vector<std::string>;
  static constexpr uint64_t kSize = 100;
  static constexpr int64_t kBackward = 5;               // of all reads
  static constexpr uint64_t kOwnOperator = UINT64_MAX;  // the access has its own operator

  explicit TargetPlayer(PlannedSchedule& schedule) : schedule_(schedule) {}

  // --- Actions of the step ---

  // Saves another tensor, which may be offloaded once another operator accesses something. A tensor
  // with `frees` false counts among the other bytes, because its memory is externally referenced.
  Log Save(uint64_t signature, uint64_t size_bytes = kSize, uint64_t by = kOwnOperator,
           bool frees = true, bool is_recomputed = false) {
    const size_t number = tensors_.size();
    Tensor& tensor = tensors_.emplace_back();
    tensor.place = {scope_, number + 1};
    tensor.size_bytes = size_bytes;
    tensor.frees = frees;
    tensor.is_here = true;
    tensor.by = by == kOwnOperator ? --last_operator_ : by;
    NotePeak();
    const SaveDecision decision = schedule_.OnSaved(scope_, {size_bytes, signature});
    tensor.objects = {decision.object};
    tensor.is_pending = decision.leaves && !is_recomputed;
    tensor.is_computed = decision.leaves && is_recomputed;
    if (!decision.leaves) Note("stay", tensor);
    if (!hold_back_) Leave(tensor.by);
    SendDeferredOffloads(tensor.by);
    Evict();
    return TakeLog();
  }
  Log SaveAll(const std::vector<uint64_t>& signatures) {
    return LogOfAll(signatures, [this](uint64_t signature) { return Save(signature); });
  }

  // Offloads everything that is still pending.
  Log EndForward() {
    Leave(kOwnOperator);
    Evict();
    schedule_.OnScopeEnd(scope_);
    return TakeLog();
  }
  Log PlayForward(const std::vector<uint64_t>& signatures) {
    Log log = SaveAll(signatures);
    return Joined(std::move(log), EndForward());
  }

  Log Read(size_t number, uint64_t by = kOwnOperator, AccessKind access = AccessKind::kRead) {
    Tensor& tensor = tensors_[number];
    Leave(by);
    if (!std::exchange(in_backward_, true)) schedule_.OnBackwardBegin(kBackward);
    schedule_.OnUsed(tensor.objects.front(), access);
    const bool computes = tensor.is_computed && !tensor.is_here && !tensor.is_held;
    if (computes) schedule_.OnRecast(tensor.objects.front());
    SendDeferredOffloads(by);
    Evict();
    if (computes) {
      Note("compute", tensor);
      tensor.is_here = true;
      tensor.by = by == kOwnOperator ? --last_operator_ : by;
      NotePeak();
    } else if (IsAway(tensor) && !tensor.is_computed) {
      Note("demand", tensor);
      Arrive(tensor);
    }
    if (tensor.is_fetched) schedule_.OnRead(tensor);
    Prefetch(tensor);
    return TakeLog();
  }
  Log Read(const std::vector<size_t>& numbers) {
    return LogOfAll(numbers, [this](size_t number) { return Read(number); });
  }
  // The same in a graph that is kept.
  Log ReadAndKeep(size_t number) { return Read(number, kOwnOperator, AccessKind::kReadAndKept); }
  Log ReadAndKeep(const std::vector<size_t>& numbers) {
    return LogOfAll(numbers, [this](size_t number) { return ReadAndKeep(number); });
  }
  // The same for the last reader. The reader owns the fetched copy; to all others the tensor is
  // offloaded.
  Log ReadLast(size_t number) {
    tensors_[number].has_last_reader = true;
    return Read(number);
  }
  // Reads, and releases each tensor after its read.
  Log ReadAndRelease(const std::vector<size_t>& numbers) {
    return LogOfAll(numbers, [this](size_t number) {
      Log log = Read(number);
      Release(number);
      return log;
    });
  }

  // Adds an external reference until LetGo: a drop frees nothing, and readers find the tensor.
  void Hold(size_t number) { tensors_[number].is_held = true; }
  void LetGo(size_t number) { tensors_[number].is_held = false; }

  void Release(size_t number) {
    Tensor& tensor = tensors_[number];
    if (std::exchange(tensor.is_over, true)) return;
    tensor.is_here = tensor.is_pending = tensor.is_held = false;
    schedule_.OnReleased(tensor.objects.front());
    if (!tensor.has_left) return;
    schedule_.OnPieceGone(tensor, &tensor);
    schedule_.OnGone(tensor);
  }
  void EndStep() {
    for (size_t number = 0; number < tensors_.size(); ++number) Release(number);
    if (std::exchange(in_backward_, false)) schedule_.OnBackwardEnd(kBackward);
    tensors_.clear();
    ++scope_;
  }

  // Runs a forward and a backward that reads in reverse and releases each tensor after its read.
  Log Play(const std::vector<uint64_t>& signatures) {
    Log log = PlayForward(signatures);
    for (size_t number = signatures.size(); number-- > 0;) {
      log = Joined(std::move(log), ReadAndRelease({number}));
    }
    EndStep();
    return log;
  }

  // --- Surroundings ---

  // Sets the device bytes of everything except tensors and weights.
  void SetOtherBytes(uint64_t size_bytes) {
    other_bytes_ = size_bytes;
    NotePeak();
  }
  // Sets the device bytes of streamed weights.
  void SetStreamedBytes(uint64_t size_bytes) { streamed_bytes_ = size_bytes; }
  // Delays all offloads until EndForward.
  void HoldBack() { hold_back_ = true; }
  // Makes the next prefetch fail.
  void RefuseOneFetch() { refuse_one_ = true; }
  // Drops everything that was prefetched.
  void WantRoom() {
    const std::vector<ScheduledParcel*> ahead = schedule_.FetchedAhead();
    schedule_.OnRoomWanted();
    for (ScheduledParcel* parcel : ahead) Drop(*parcel);
  }

  // --- Results ---

  const ScheduledParcel& parcel(size_t number) const { return tensors_[number]; }
  bool IsHere(size_t number) const { return tensors_[number].is_here || tensors_[number].is_held; }
  uint64_t device_bytes() const {
    uint64_t bytes = other_bytes_ + streamed_bytes_;
    for (const Tensor& tensor : tensors_) {
      if ((tensor.is_here || tensor.is_held) && tensor.frees) bytes += tensor.size_bytes;
    }
    return bytes;
  }
  uint64_t peak_bytes() const { return peak_bytes_; }

 private:
  struct Tensor : ScheduledParcel {
    uint64_t by = 0;
    bool frees = true;
    bool is_here = false;  // resident
    bool is_held = false;  // externally referenced
    bool is_pending = false;
    bool is_computed = false;  // recomputed for each operator that reads it
    bool has_left = false;
    bool is_fetched = false;
    bool has_last_reader = false;
    bool is_over = false;
  };

  Log TakeLog() { return std::exchange(notes_, {}); }
  static Log Joined(Log log, const Log& more) {
    log.insert(log.end(), more.begin(), more.end());
    return log;
  }
  template <typename T, typename Action>
  static Log LogOfAll(const std::vector<T>& targets, Action action) {
    Log log;
    for (const T& target : targets) log = Joined(std::move(log), action(target));
    return log;
  }

  static bool IsAway(const Tensor& tensor) { return !tensor.is_here && !tensor.is_held; }
  void Note(const std::string& what, const ScheduledParcel& tensor) {
    notes_.push_back(what + " " + std::to_string(tensor.place.sequence - 1));
  }
  void NotePeak() { peak_bytes_ = std::max(peak_bytes_, device_bytes()); }

  // Tensors whose operator still runs are sent later.
  void SendDeferredOffloads(uint64_t unless_by) {
    schedule_.OnDeviceBytes(device_bytes(), streamed_bytes_);
    for (const uint32_t deferred : schedule_.TakeDeferredOffloads()) {
      const auto is_it = [deferred](const Tensor& tensor) {
        return !tensor.is_over && tensor.objects.front() == deferred;
      };
      Tensor& tensor = *std::find_if(tensors_.begin(), tensors_.end(), is_it);
      if (hold_back_ || tensor.by == unless_by) {
        tensor.is_pending = true;
      } else {
        SendOut(tensor);
      }
    }
  }
  void Leave(uint64_t unless_by) {
    for (Tensor& tensor : tensors_) {
      if (tensor.is_computed && tensor.by != unless_by) tensor.is_here = false;
      if (tensor.is_pending && tensor.by != unless_by) SendOut(tensor);
    }
  }
  void SendOut(Tensor& tensor) {
    tensor.is_pending = false;
    tensor.has_left = true;
    Note("out", tensor);
    const HeldBytes held = {&tensor, tensor.size_bytes};
    schedule_.OnLeft(tensor, {&held, 1});
  }

  void Evict() {
    for (;;) {
      schedule_.OnDeviceBytes(device_bytes(), streamed_bytes_);
      const ScheduledParcels parcels = schedule_.TakeEvictions();
      if (parcels.empty()) return;
      for (ScheduledParcel* parcel : parcels) {
        Note("drop", *parcel);
        Drop(*parcel);
      }
    }
  }
  void Drop(ScheduledParcel& parcel) {
    auto& tensor = static_cast<Tensor&>(parcel);
    EXPECT_TRUE(tensor.has_left && tensor.is_here) << tensor.place.sequence - 1;
    tensor.is_here = false;
    if (tensor.is_held) schedule_.OnNotFreed(tensor.objects.front());
    if (std::exchange(tensor.is_fetched, false)) schedule_.OnDropped(tensor);
  }

  void Arrive(Tensor& tensor) {
    tensor.is_here = tensor.is_fetched = true;
    NotePeak();
    schedule_.OnFetched(tensor, kBackward);
  }
  void Prefetch(const Tensor& read) {
    for (;;) {
      schedule_.OnDeviceBytes(device_bytes(), streamed_bytes_);
      const ScheduledParcels parcels =
          schedule_
              .TakeFetches(read.place, kBackward,
                           [](const ScheduledParcel& parcel) {
                             const auto& tensor = static_cast<const Tensor&>(parcel);
                             return IsAway(tensor) || tensor.has_last_reader;
                           })
              .parcels;
      if (parcels.empty()) return;
      if (std::exchange(refuse_one_, false)) return schedule_.OnFetchesRefused(parcels);
      for (ScheduledParcel* parcel : parcels) {
        Note("fetch", *parcel);
        Arrive(static_cast<Tensor&>(*parcel));
      }
      schedule_.OnFetchesMade(/*room_was_made=*/false);
    }
  }

  PlannedSchedule& schedule_;
  ScopeId scope_ = 1;
  std::deque<Tensor> tensors_;  // of the current step
  uint64_t last_operator_ = kOwnOperator;
  uint64_t other_bytes_ = 0;
  uint64_t streamed_bytes_ = 0;
  uint64_t peak_bytes_ = 0;
  bool in_backward_ = false;
  bool hold_back_ = false;
  bool refuse_one_ = false;
  Log notes_;
};

// A schedule that knows these plans, and a player of its next steps.
//
//   auto [schedule, player] = PlayedSchedule(options, {cached});
struct PlayedSchedule {
  explicit PlayedSchedule(const TargetOptions& options,
                          const std::vector<std::shared_ptr<const CachedPlan>>& known = {})
      : schedule(options), player(schedule) {
    for (const auto& cached : known) schedule.Learn(cached);
  }
  PlannedSchedule schedule;
  TargetPlayer player;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_SCHEDULE_TARGET_PLAYER_H_
