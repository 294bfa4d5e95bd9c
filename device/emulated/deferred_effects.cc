#include "pinion/device/emulated/deferred_effects.h"

#include <cstring>
#include <utility>

namespace pinion {

std::deque<DeferredEffects::Effect>& DeferredEffects::QueueOf(int stream) {
  if (stream >= static_cast<int>(queues_.size())) queues_.resize(stream + 1);
  return queues_[stream];
}

void DeferredEffects::AddCopy(StreamPoint at, std::vector<CopyPiece> pieces) {
  QueueOf(at.stream).push_back({at.seq, Kind::kCopy, {}, std::move(pieces)});
}

void DeferredEffects::AddObstacle(StreamPoint at) {
  QueueOf(at.stream).push_back({at.seq, Kind::kObstacle, {}, {}});
}

void DeferredEffects::AddWait(StreamPoint at, StreamPoint waited_for) {
  if (Applied(waited_for)) return;
  QueueOf(at.stream).push_back({at.seq, Kind::kWait, waited_for, {}});
}

bool DeferredEffects::Applied(StreamPoint point) const {
  if (point.stream >= static_cast<int>(queues_.size())) return true;
  const std::deque<Effect>& queue = queues_[point.stream];
  return queue.empty() || queue.front().seq > point.seq;
}

void DeferredEffects::ApplyCopy(const Effect& effect) {
  for (const CopyPiece& piece : effect.pieces) {
    std::memmove(piece.dst, piece.src, piece.size_bytes);
  }
}

bool DeferredEffects::Force(StreamPoint point) {
  // An explicit stack, because chains of waits can be arbitrarily long.
  std::vector<StreamPoint> wanted = {point};
  while (!wanted.empty()) {
    const StreamPoint target = wanted.back();
    if (Applied(target)) {
      wanted.pop_back();
      continue;
    }
    std::deque<Effect>& queue = queues_[target.stream];
    const Effect& effect = queue.front();
    switch (effect.kind) {
      case Kind::kObstacle:
        return false;
      case Kind::kWait:
        if (Applied(effect.waited_for)) {
          queue.pop_front();
        } else {
          wanted.push_back(effect.waited_for);
        }
        break;
      case Kind::kCopy:
        ApplyCopy(effect);
        queue.pop_front();
        break;
    }
  }
  return true;
}

void DeferredEffects::ApplySome() {
  if (queues_.empty()) return;
  // On average one effect in two calls: some copies run early, others lag far behind.
  while (random_() % 3 == 0) {
    std::deque<Effect>& queue = queues_[random_() % queues_.size()];
    if (queue.empty()) continue;
    const Effect& effect = queue.front();
    if (effect.kind == Kind::kObstacle) continue;
    if (!Applied(effect.waited_for)) continue;  // always true of a copy
    if (effect.kind == Kind::kCopy) ApplyCopy(effect);
    queue.pop_front();
  }
}

}  // namespace pinion
