#include "pinion/engine/schedule/offload_schedule.h"

#include <algorithm>
#include <utility>

#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

// Half of an automatic window of this size is the smallest batch.
constexpr uint64_t kLeastBatchBytes = 32 * kKiB;

// The memory's size when that parcel was offloaded. Later parcels may have recorded another size.
uint64_t BytesOf(const void* owner, const ScheduledParcel& parcel) {
  const auto& held = parcel.scheduled.held;
  return std::find_if(held.begin(), held.end(),
                      [owner](const auto& memory) { return memory.memory.owner == owner; })
      ->memory.size_bytes;
}

}  // namespace

// -------------------------------------------------------------------------------------- windows

SaveDecision OffloadSchedule::OnSaved(ScopeId scope, const SavedObject& saved) {
  if (scopes_[scope].Add(saved.size_bytes)) SetAutoBytes();
  return SaveDecision();
}

void OffloadSchedule::OnScopeEnd(ScopeId scope) {
  const auto ended = scopes_.extract(scope);
  if (!ended.empty()) last_scope_ = ended.mapped();
  SetAutoBytes();
}

void OffloadSchedule::SetAutoBytes() {
  auto_bytes_ = AutoWindowBytes(ScopeSizes(), last_scope_);
  for (const auto& [id, saved] : scopes_) {
    auto_bytes_ = std::max(auto_bytes_, AutoWindowBytes(saved, last_scope_));
  }
}

uint64_t OffloadSchedule::ShareOfWindow(uint64_t option, uint64_t size_bytes) const {
  if (option != WindowOptions::kAuto) return size_bytes;
  return std::min(size_bytes, Window(option) / 2);
}

uint64_t OffloadSchedule::FullBatchBytes() const {
  const uint64_t window_bytes = Window(options_.eviction_bytes);
  uint64_t batch_bytes = window_bytes / 4;
  if (options_.eviction_bytes == WindowOptions::kAuto) {
    batch_bytes = std::max(batch_bytes, std::min(window_bytes / 2, kLeastBatchBytes));
  }
  return std::min(options_.full_batch_bytes, batch_bytes);
}

// ------------------------------------------------------------------------------------- eviction

void OffloadSchedule::OnLeft(ScheduledParcel& parcel, absl::Span<const HeldBytes> held) {
  ScheduledParcel::Scheduled& mine = parcel.scheduled;
  order_.emplace_hint(order_.end(), parcel.place, &parcel);  // most are saved after all others
  if (held.empty()) return;
  EnterWindow(parcel);
  uint64_t held_bytes = 0;
  for (const HeldBytes& memory : held) {
    const auto known = std::find_if(mine.held.begin(), mine.held.end(), [&](const auto& other) {
      return other.memory.owner == memory.owner;
    });
    if (known != mine.held.end()) {
      ++known->pieces;
      continue;
    }
    mine.held.push_back({memory, /*pieces=*/1});
    auto& holders = holders_[memory.owner];
    if (!holders.empty()) {
      ScheduledParcel& before = *holders.back();
      SetHeldBytes(before, before.scheduled.held_bytes - BytesOf(memory.owner, before));
    }
    holders.push_back(&parcel);
    held_bytes += memory.size_bytes;
  }
  SetHeldBytes(parcel, held_bytes);
}

void OffloadSchedule::OnSavedAgain(ScheduledParcel& parcel, const SavedPlace& place) {
  if (place <= parcel.place) return;
  order_.erase(parcel.place);
  parcel.place = place;
  order_.emplace(parcel.place, &parcel);
}

void OffloadSchedule::SetHeldBytes(ScheduledParcel& parcel, uint64_t held_bytes) {
  const uint64_t window_bytes = ShareOfWindow(options_.eviction_bytes, held_bytes);
  window_bytes_ += window_bytes;
  window_bytes_ -= std::exchange(parcel.scheduled.window_bytes, window_bytes);
  parcel.scheduled.held_bytes = held_bytes;
}

// Stops counting the memory for this parcel, and counts it for the parcel before, if there is one.
void OffloadSchedule::StopHolding(ScheduledParcel& parcel, const HeldBytes& memory) {
  const auto found = holders_.find(memory.owner);
  auto& holders = found->second;
  if (holders.back() == &parcel) {
    holders.pop_back();
    SetHeldBytes(parcel, parcel.scheduled.held_bytes - memory.size_bytes);
    if (!holders.empty()) {
      ScheduledParcel& before = *holders.back();
      SetHeldBytes(before, before.scheduled.held_bytes + BytesOf(memory.owner, before));
    }
  } else {
    holders.erase(std::find(holders.begin(), holders.end(), &parcel));
  }
  if (holders.empty()) holders_.erase(found);
}

void OffloadSchedule::OnPieceGone(ScheduledParcel& parcel, const void* owner) {
  auto& held = parcel.scheduled.held;
  const auto found = std::find_if(held.begin(), held.end(), [owner](const auto& memory) {
    return memory.memory.owner == owner;
  });
  if (found == held.end() || --found->pieces > 0) return;
  const HeldBytes memory = found->memory;
  held.erase(found);
  StopHolding(parcel, memory);
}

void OffloadSchedule::EnterWindow(ScheduledParcel& parcel) {
  PINION_CHECK(!std::exchange(parcel.scheduled.in_window, true)) << "a parcel leaves once";
  parcel.scheduled.older = newest_;
  (newest_ == nullptr ? oldest_ : newest_->scheduled.newer) = &parcel;
  newest_ = &parcel;
}

void OffloadSchedule::LeaveWindow(ScheduledParcel& parcel) {
  if (!std::exchange(parcel.scheduled.in_window, false)) return;
  for (const auto& held : parcel.scheduled.held) StopHolding(parcel, held.memory);
  parcel.scheduled.held.clear();
  ScheduledParcel* const older = std::exchange(parcel.scheduled.older, nullptr);
  ScheduledParcel* const newer = std::exchange(parcel.scheduled.newer, nullptr);
  (older == nullptr ? oldest_ : older->scheduled.newer) = newer;
  (newer == nullptr ? newest_ : newer->scheduled.older) = older;
}

bool OffloadSchedule::OnGone(ScheduledParcel& parcel) {
  order_.erase(parcel.place);
  LeaveWindow(parcel);
  return StopFetchedAhead(parcel);
}

ScheduledParcels OffloadSchedule::TakeEvictions() {
  if (options_.eviction_tensors != WindowOptions::kNoTensors) return TakeOld();
  return TakeDownTo(Window(options_.eviction_bytes));
}

ScheduledParcels OffloadSchedule::TakeOld() {
  ScheduledParcels taken;
  for (ScheduledParcel* parcel = oldest_; parcel != nullptr; parcel = parcel->scheduled.newer) {
    if (saves_ - parcel->place.sequence >= options_.eviction_tensors) taken.push_back(parcel);
  }
  for (ScheduledParcel* parcel : taken) LeaveWindow(*parcel);
  return taken;
}

ScheduledParcels OffloadSchedule::TakeDownTo(uint64_t limit_bytes, const ScheduledParcel* kept) {
  ScheduledParcels taken;
  for (ScheduledParcel* parcel = oldest_; parcel != nullptr && window_bytes_ > limit_bytes;) {
    ScheduledParcel* const next = parcel->scheduled.newer;
    if (parcel != kept) {
      LeaveWindow(*parcel);
      taken.push_back(parcel);
    }
    parcel = next;
  }
  return taken;
}

bool OffloadSchedule::Take(ScheduledParcel& parcel) {
  if (!parcel.scheduled.in_window) return false;
  LeaveWindow(parcel);
  return true;
}

// ------------------------------------------------------------------------------------- prefetch

void OffloadSchedule::OnBackwardBegin(int64_t backward) {
  cursors_.try_emplace(backward);
  back_off_ = BackOff();
}

void OffloadSchedule::OnFetched(ScheduledParcel& parcel, int64_t backward) {
  parcel.scheduled.fetched_in = backward;
}

bool OffloadSchedule::StopFetchedAhead(ScheduledParcel& parcel) {
  if (!std::exchange(parcel.scheduled.fetched_ahead, false)) return false;
  ahead_bytes_ -= parcel.scheduled.ahead_bytes;
  return true;
}

void OffloadSchedule::OnFetchesRefused(absl::Span<ScheduledParcel* const> parcels) {
  for (ScheduledParcel* parcel : parcels) StopFetchedAhead(*parcel);
  // A failed allocation is expensive: LibTorch's allocator for CUDA frees its cache.
  back_off_.Refused();
  for (auto& [backward, cursor] : cursors_) cursor = Cursor();
}

void OffloadSchedule::OnRoomWanted() {
  for (auto& [backward, cursor] : cursors_) cursor = Cursor();
  for (const auto& [place, parcel] : order_) {
    if (parcel->scheduled.fetched_ahead) parcel->scheduled.fetched_in = -1;
  }
}

void OffloadSchedule::TakeFetch(ScheduledParcel& parcel) {
  parcel.scheduled.fetched_ahead = true;
  parcel.scheduled.ahead_bytes = ShareOfWindow(options_.prefetch_bytes, parcel.size_bytes);
  ahead_bytes_ += parcel.scheduled.ahead_bytes;
}

OffloadSchedule::Fetches OffloadSchedule::TakeFetches(
    const SavedPlace& from, int64_t backward,
    absl::FunctionRef<bool(const ScheduledParcel&)> is_away) {
  Fetches taken;
  if (!MayFetch()) return taken;
  const uint64_t limit_bytes = Window(options_.prefetch_bytes);
  const uint64_t batch_limit_bytes = FullBatchBytes();
  uint64_t batch_bytes = 0;
  Cursor& cursor = cursors_[backward];
  // A tensor that was saved early may be read in between, even by all nodes (an attention mask).
  // Then the parcels before it are examined next, and the range that was examined already is
  // skipped.
  Cursor before;
  taken.is_all = true;
  if (cursor.scope != from.scope || from.sequence < cursor.oldest ||
      from.sequence > cursor.newest) {
    before = std::exchange(cursor, {from.scope, from.sequence, from.sequence});
  }
  for (auto it = order_.lower_bound({from.scope, cursor.oldest}); it != order_.begin();) {
    ScheduledParcel& parcel = *(--it)->second;
    // Another scope is another graph, whose backward may be far away.
    if (parcel.place.scope != from.scope) break;
    ++taken.looks;
    if (before.scope == from.scope && parcel.place.sequence < before.newest &&
        parcel.place.sequence >= before.oldest) {
      cursor.oldest = before.oldest;
      it = order_.lower_bound({from.scope, before.oldest});
      continue;
    }
    // A node reads its tensors in its own order. So parcels before this one may have been read
    // already, by handles that are released when the node is done.
    const bool had = backward != -1 && parcel.scheduled.fetched_in == backward;
    // A prefetched parcel may count as offloaded until its reader reports the read.
    if (had || parcel.scheduled.fetched_ahead || !is_away(parcel)) {
      cursor.oldest = parcel.place.sequence;
      continue;
    }
    const uint64_t share_bytes = ShareOfWindow(options_.prefetch_bytes, parcel.size_bytes);
    // The window comes first: if it is full, the next batch would be empty too.
    if (ahead_bytes_ > 0 && ahead_bytes_ + share_bytes > limit_bytes) break;
    if (!taken.parcels.empty() && (parcel.stream != taken.parcels.front()->stream ||
                                   batch_bytes + parcel.size_bytes > batch_limit_bytes)) {
      taken.is_all = false;
      break;
    }
    TakeFetch(parcel);
    batch_bytes += parcel.size_bytes;
    taken.parcels.push_back(&parcel);
    cursor.oldest = parcel.place.sequence;
  }
  return taken;
}

std::vector<ScheduledParcel*> OffloadSchedule::FetchedAhead() const {
  std::vector<ScheduledParcel*> parcels;
  for (const auto& [place, parcel] : order_) {
    if (parcel->scheduled.fetched_ahead) parcels.push_back(parcel);
  }
  return parcels;
}

std::vector<ScheduledParcel*> OffloadSchedule::FetchedIn(int64_t backward) const {
  std::vector<ScheduledParcel*> parcels;
  for (const auto& [place, parcel] : order_) {
    if (parcel->scheduled.fetched_in == backward) parcels.push_back(parcel);
  }
  return parcels;
}

namespace {

// Limit for the sixteenth of the last scope. Two tensors of the usual size fit in any case.
constexpr uint64_t kMostOfAScope = 256 * kMiB;

// Two batches of small tensors fit in this much. Limited to a sixth of the last scope, so that
// small scopes are offloaded too.
constexpr uint64_t kLeastBytes = 64 * kKiB;
constexpr uint64_t kLeastPart = 6;

}  // namespace

bool ScopeSizes::Add(uint64_t size_bytes) {
  total_bytes_ += size_bytes;
  if (size_bytes <= largest_.back()) return false;
  largest_.back() = size_bytes;
  for (size_t i = largest_.size() - 1; i > 0 && largest_[i - 1] < largest_[i]; --i) {
    std::swap(largest_[i - 1], largest_[i]);
  }
  return true;
}

uint64_t ScopeSizes::usual_bytes() const {
  for (size_t i = largest_.size(); i > 0; --i) {
    if (largest_[i - 1] > 0) return largest_[i - 1];
  }
  return 0;
}

uint64_t AutoWindowBytes(const ScopeSizes& now, const ScopeSizes& last) {
  return std::max({2 * std::max(now.usual_bytes(), last.usual_bytes()),
                   std::min(kMostOfAScope, last.total_bytes() / 16),
                   std::min(kLeastBytes, last.total_bytes() / kLeastPart)});
}

}  // namespace pinion
