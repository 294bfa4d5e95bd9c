#include "pinion/engine/plan/visit_loop.h"

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

// Whether room for one object gives each copy as much time as room for two. Room for one streams
// one object less of the round, but no copy runs while the streamed object before it is in use.
bool IsFarApart(uint64_t streamed_bytes, uint64_t round_bytes, uint64_t largest_bytes) {
  const auto streamed = static_cast<double>(streamed_bytes) / static_cast<double>(largest_bytes);
  const auto all = static_cast<double>(round_bytes) / static_cast<double>(largest_bytes);
  return all / streamed - 1 >= all / (streamed + 1);
}

}  // namespace

// The window keeps room for the two largest objects: one is used while the other is fetched. Two
// exceptions make the room smaller:
// * Some objects are much larger than the rest, such as an embedding and a head. These stay, and
//   the room is for three of the rest. Room for two would fetch those that lie close together late.
// * The streamed objects are far apart. Then room for one is enough.
std::vector<uint32_t> ResidentInLoop(const std::vector<SizedObject>& round, uint64_t window_bytes) {
  const uint64_t round_bytes = BytesOf(round);
  if (round_bytes <= window_bytes) return {};
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
  if (large_bytes == 0 &&
      IsFarApart(round_bytes - window_bytes + sizes[0], round_bytes, sizes[0])) {
    room_bytes = sizes[0];
  }
  if (window_bytes <= room_bytes + large_bytes) return {};
  std::vector<uint32_t> stay;
  std::vector<SizedObject> rest;
  for (const SizedObject& sized : round) {
    if (sized.size_bytes >= least_large_bytes) {
      stay.push_back(sized.object);
    } else {
      rest.push_back(sized);
    }
  }
  for (const SizedObject& sized : Spread(rest, window_bytes - room_bytes - large_bytes)) {
    stay.push_back(sized.object);
  }
  return stay;
}

}  // namespace pinion
