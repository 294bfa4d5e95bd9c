#include "pinion/engine/schedule/loop_plan.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>

namespace pinion {
namespace {

uint64_t BytesOf(const std::vector<SizedObject>& objects) {
  uint64_t bytes = 0;
  for (const SizedObject& sized : objects) bytes += sized.size_bytes;
  return bytes;
}

// Chooses as many objects as fit in `most_bytes`. An object is chosen where its predecessors have
// left enough of an even share.
std::vector<SizedObject> ChooseShare(const std::vector<SizedObject>& round, uint64_t most_bytes) {
  const double share = static_cast<double>(most_bytes) / static_cast<double>(BytesOf(round));
  std::vector<SizedObject> chosen;
  double seen_bytes = 0;
  uint64_t chosen_bytes = 0;
  for (const SizedObject& sized : round) {
    seen_bytes += static_cast<double>(sized.size_bytes);
    const double room_bytes = std::round(seen_bytes * share) - static_cast<double>(chosen_bytes);
    if (room_bytes < static_cast<double>(sized.size_bytes)) continue;
    chosen.push_back(sized);
    chosen_bytes += sized.size_bytes;
  }
  return chosen;
}

// Chooses as many of the round's objects as fit in `most_bytes`, spread over the round.
std::vector<SizedObject> Spread(const std::vector<SizedObject>& round, uint64_t most_bytes) {
  const std::vector<SizedObject> first = ChooseShare(round, most_bytes);
  // A share without the bytes that no object fills spreads better: two streamed objects in a row
  // would use them up.
  const std::vector<SizedObject> even = ChooseShare(round, BytesOf(first));
  return BytesOf(even) == BytesOf(first) ? even : first;
}

// Chooses what stays. The window keeps room for the two largest objects: one is used while the
// other is fetched. Exception: objects much larger than the rest, such as an embedding and a head,
// stay, and the room is for three of the rest, if that room is smaller. With room for two, fetches
// of streamed objects that lie close together would be late.
std::vector<SizedObject> ChooseWhatStays(const std::vector<SizedObject>& round,
                                         uint64_t window_bytes) {
  std::vector<uint64_t> sizes;
  for (const SizedObject& sized : round) sizes.push_back(sized.size_bytes);
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  uint64_t room_bytes = sizes[0] + (sizes.size() > 1 ? sizes[1] : 0);
  uint64_t least_large_bytes = UINT64_MAX;  // from this size on all objects stay
  uint64_t large_bytes = 0;                 // of these objects together
  uint64_t sum_bytes = 0;
  for (size_t count = 1; count + 2 < sizes.size(); ++count) {
    sum_bytes += sizes[count - 1];
    const uint64_t three_bytes = sizes[count] + sizes[count + 1] + sizes[count + 2];
    if (sum_bytes + three_bytes >= window_bytes) break;
    if (sizes[count - 1] == sizes[count] || three_bytes >= room_bytes) continue;
    least_large_bytes = sizes[count - 1];
    large_bytes = sum_bytes;
    room_bytes = three_bytes;
  }
  if (window_bytes <= room_bytes + large_bytes) return {};
  std::vector<SizedObject> stay, rest;
  for (const SizedObject& sized : round) {
    (sized.size_bytes >= least_large_bytes ? stay : rest).push_back(sized);
  }
  const std::vector<SizedObject> spread = Spread(rest, window_bytes - room_bytes - large_bytes);
  stay.insert(stay.end(), spread.begin(), spread.end());
  return stay;
}

LoopPlan LoopOf(const std::vector<SizedObject>& stay, uint64_t most_ahead_bytes = UINT64_MAX) {
  LoopPlan loop = {.stay = {}, .most_ahead_bytes = most_ahead_bytes};
  for (const SizedObject& sized : stay) loop.stay.push_back(sized.object);
  return loop;
}

}  // namespace

LoopPlan PlanLoop(const std::vector<SizedObject>& round, uint64_t window_bytes) {
  const uint64_t round_bytes = BytesOf(round);
  if (round_bytes <= window_bytes) return {};
  const std::vector<SizedObject> stay = ChooseWhatStays(round, window_bytes);
  const uint64_t largest_bytes =
      std::max_element(round.begin(), round.end(), [](const SizedObject& a, const SizedObject& b) {
        return a.size_bytes < b.size_bytes;
      })->size_bytes;
  // To move on, objects of about one size take turns. At least half of them are resident beside
  // two: otherwise streamed objects would be neighbours, with the time of one use for each copy.
  const bool may_move_on = 5 * largest_bytes * round.size() <= 6 * round_bytes &&
                           2 * window_bytes >= round_bytes + 4 * largest_bytes;
  if (!may_move_on) return LoopOf(stay);
  const std::vector<SizedObject> first = Spread(round, window_bytes - largest_bytes);
  const uint64_t streamed_bytes = round_bytes - BytesOf(first);
  // One in so many objects is streamed, and is fetched as many uses ahead.
  const uint64_t uses_ahead = (round_bytes + streamed_bytes - 1) / streamed_bytes;
  const uint64_t ahead_bytes = (uses_ahead + 1) * largest_bytes;
  if (ahead_bytes >= round_bytes) return LoopOf(stay);
  // An object is resident from its fetch, `uses_ahead` uses ahead, until it is evicted.
  const double fetched_bytes = static_cast<double>(round_bytes) *
                               static_cast<double>(streamed_bytes - largest_bytes) /
                               static_cast<double>(round_bytes - ahead_bytes);
  const bool fetches_less = fetched_bytes < static_cast<double>(round_bytes - BytesOf(stay));
  return fetches_less ? LoopOf(first, ahead_bytes) : LoopOf(stay);
}

}  // namespace pinion
