#include "pinion/engine/plan/copy_order.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <queue>
#include <tuple>
#include <utility>

#include "pinion/engine/plan/step_lives.h"

namespace pinion {
namespace {

struct Copy {
  uint32_t ready_at = 0;  // the use at which it can be submitted
  uint32_t object = 0;
  uint32_t drop_at = 0;
  size_t move = 0;

  // Where nothing is deferred, copies are submitted in this order.
  std::pair<uint32_t, uint32_t> place() const { return {ready_at, object}; }
};

struct DropsLater {
  bool operator()(const Copy& a, const Copy& b) const {
    return std::tie(a.drop_at, a.object) > std::tie(b.drop_at, b.object);
  }
};

std::vector<Copy> CopiesOf(const StepRecord& step, const std::vector<StepMove>& moves) {
  const std::vector<size_t> leaves_from = LeavesFrom(step);
  std::vector<Copy> copies;
  for (size_t i = 0; i < moves.size(); ++i) {
    const StepMove& move = moves[i];
    if (!move.copies_out) continue;
    const size_t ready_at = std::min<size_t>(leaves_from[move.object], move.drop_at);
    copies.push_back({static_cast<uint32_t>(ready_at), move.object, move.drop_at, i});
  }
  std::sort(copies.begin(), copies.end(),
            [](const Copy& a, const Copy& b) { return a.place() < b.place(); });
  return copies;
}

}  // namespace

std::vector<StepMove> InOrderOfDrops(const StepRecord& step, std::vector<StepMove> moves,
                                     const StepTimes& times) {
  const std::vector<Copy> copies = CopiesOf(step, moves);
  const auto ready_us = [&](const Copy& copy) {
    return times.begins_us[copy.ready_at] + step.stretches[copy.ready_at].compute_us;
  };
  std::priority_queue<Copy, std::vector<Copy>, DropsLater> waiting;
  double free_us = 0;  // the link, from then on
  std::pair<uint32_t, uint32_t> last_place = {0, 0};
  uint32_t waits_at = UINT32_MAX;  // what could go at that use as well goes behind one that waits
  for (size_t next = 0; next < copies.size() || !waiting.empty();) {
    if (waiting.empty()) free_us = std::max(free_us, ready_us(copies[next]));
    for (; next < copies.size() && ready_us(copies[next]) <= free_us; ++next) {
      waiting.push(copies[next]);
    }
    const Copy copy = waiting.top();
    waiting.pop();
    free_us += times.out_us[copy.move] - times.out_begins_us[copy.move];
    const bool waits = copy.place() < last_place || copy.ready_at == waits_at;
    last_place = std::max(last_place, copy.place());
    moves[copy.move].copy_at = waits ? last_place.first : StepMove::kAtOnce;
    if (waits) waits_at = last_place.first;
  }
  return moves;
}

}  // namespace pinion
