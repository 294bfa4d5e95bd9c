#include "pinion/engine/schedule/visit_loop.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace pinion {
namespace {

// Of these objects, as many as have room, each where those before it leave what it takes of an even
// share.
std::vector<SizedObject> ThoseOfAShare(const std::vector<SizedObject>& round, uint64_t round_bytes,
                                       uint64_t most_bytes) {
  const double share = static_cast<double>(most_bytes) / static_cast<double>(round_bytes);
  std::vector<SizedObject> stay;
  double seen_bytes = 0;
  uint64_t stay_bytes = 0;
  for (const SizedObject& sized : round) {
    seen_bytes += static_cast<double>(sized.size_bytes);
    const double room_bytes = std::round(seen_bytes * share) - static_cast<double>(stay_bytes);
    if (room_bytes < static_cast<double>(sized.size_bytes)) continue;
    stay.push_back(sized);
    stay_bytes += sized.size_bytes;
  }
  return stay;
}

uint64_t BytesOf(const std::vector<SizedObject>& objects) {
  uint64_t bytes = 0;
  for (const SizedObject& sized : objects) bytes += sized.size_bytes;
  return bytes;
}

// Of the round's objects, spread over it, as many as have room.
std::vector<SizedObject> Spread(const std::vector<SizedObject>& round, uint64_t most_bytes) {
  const uint64_t round_bytes = BytesOf(round);
  std::vector<SizedObject> first = ThoseOfAShare(round, round_bytes, most_bytes);
  // With what they have of it, if that is as much: the part of an object that is left over would be
  // a place where two that are away come in a row.
  std::vector<SizedObject> even = ThoseOfAShare(round, round_bytes, BytesOf(first));
  return BytesOf(even) == BytesOf(first) ? even : first;
}

// All down to some size, and of the others, spread over the round, as many as leave room for three
// of them. With room for two, what is away and lies close together came late (conv nets, experts).
// Nothing where three of the others take no less than the two largest of all.
std::vector<SizedObject> LargestAndSpread(const std::vector<SizedObject>& round,
                                          uint64_t window_bytes) {
  std::vector<uint64_t> sizes;
  for (const SizedObject& sized : round) sizes.push_back(sized.size_bytes);
  std::sort(sizes.rbegin(), sizes.rend());
  uint64_t least_bytes = UINT64_MAX;  // of one that stays in any case
  uint64_t largest_bytes = 0;         // of all those
  uint64_t room_bytes = sizes[0] + (sizes.size() > 1 ? sizes[1] : 0);
  uint64_t sum_bytes = 0;
  for (size_t count = 1; count + 2 < sizes.size(); ++count) {
    sum_bytes += sizes[count - 1];
    const uint64_t three_bytes = sizes[count] + sizes[count + 1] + sizes[count + 2];
    if (sum_bytes + three_bytes >= window_bytes) break;
    if (sizes[count - 1] == sizes[count] || three_bytes >= room_bytes) continue;
    least_bytes = sizes[count - 1];
    largest_bytes = sum_bytes;
    room_bytes = three_bytes;
  }
  std::vector<SizedObject> stay, others;
  for (const SizedObject& sized : round) {
    (sized.size_bytes >= least_bytes ? stay : others).push_back(sized);
  }
  if (stay.empty()) return stay;
  const std::vector<SizedObject> spread = Spread(others, window_bytes - room_bytes - largest_bytes);
  stay.insert(stay.end(), spread.begin(), spread.end());
  return stay;
}

std::vector<uint32_t> NumbersOf(const std::vector<SizedObject>& objects) {
  std::vector<uint32_t> numbers;
  for (const SizedObject& sized : objects) numbers.push_back(sized.object);
  return numbers;
}

}  // namespace

std::vector<VisitLoop> LoopsWithin(const std::vector<SizedObject>& round, uint64_t window_bytes) {
  using Kind = VisitLoop::Kind;
  std::vector<VisitLoop> loops = {{}};
  const uint64_t round_bytes = BytesOf(round);
  if (round_bytes <= window_bytes) return loops;
  uint64_t largest_bytes = 0, second_bytes = 0;
  for (const SizedObject& sized : round) {
    second_bytes = std::max(second_bytes, std::min(largest_bytes, sized.size_bytes));
    largest_bytes = std::max(largest_bytes, sized.size_bytes);
  }
  if (window_bytes > largest_bytes + second_bytes) {
    const uint64_t most_bytes = window_bytes - largest_bytes - second_bytes;
    loops.push_back({.kind = Kind::kShareStays, .stay = NumbersOf(Spread(round, most_bytes))});
    if (2 * most_bytes >= round_bytes) {
      const std::vector<SizedObject> stay = Spread(round, most_bytes + second_bytes);
      const uint64_t away_bytes = round_bytes - BytesOf(stay);
      // From one that is away to the next it is so many uses, and one is in use.
      const uint64_t most_ahead = (round_bytes + away_bytes - 1) / away_bytes + 1;
      loops.push_back({Kind::kAllMoveOn, NumbersOf(stay), most_ahead * largest_bytes});
    }
  }
  const std::vector<SizedObject> largest = LargestAndSpread(round, window_bytes);
  if (!largest.empty()) loops.push_back({.kind = Kind::kLargestStay, .stay = NumbersOf(largest)});
  return loops;
}

}  // namespace pinion
