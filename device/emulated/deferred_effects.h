// Decides when the bytes of emulated copies move.
//
// A submitted copy takes effect later: in stream order, and after everything its stream waited for.
// It reads its source at that moment. So a program that reuses a buffer too early sees wrong bytes,
// as on a real device. Kernels take effect at submission and have no entry here: their caller
// forces their stream first.
//
// Thread safety: none.

#ifndef PINION_DEVICE_EMULATED_DEFERRED_EFFECTS_H_
#define PINION_DEVICE_EMULATED_DEFERRED_EFFECTS_H_

#include <cstdint>
#include <deque>
#include <random>
#include <vector>

#include "pinion/device/device.h"

namespace pinion {

// A point of a stream: its first `seq` entries. Entries count from 1.
struct StreamPoint {
  int stream = 0;
  uint64_t seq = 0;
};

class DeferredEffects {
 public:
  explicit DeferredEffects(uint64_t seed) : random_(seed) {}

  // Append to a stream. Streams are small numbers; `seq` rises within a stream.
  void AddCopy(StreamPoint at, std::vector<CopyPiece> pieces);
  // Stops the stream: no later entry takes effect.
  void AddObstacle(StreamPoint at);
  void AddWait(StreamPoint at, StreamPoint waited_for);

  // Applies everything up to `point` and its dependencies. Returns false if an obstacle blocks the
  // way, after applying all effects before it.
  bool Force(StreamPoint point);

  // Applies a random selection of the effects that may legally happen now.
  void ApplySome();

 private:
  enum class Kind { kCopy, kWait, kObstacle };
  struct Effect {
    uint64_t seq;
    Kind kind;
    StreamPoint waited_for;
    std::vector<CopyPiece> pieces;
  };

  bool Applied(StreamPoint point) const;
  std::deque<Effect>& QueueOf(int stream);
  void ApplyCopy(const Effect& effect);

  std::vector<std::deque<Effect>> queues_;  // by stream
  std::mt19937_64 random_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_DEFERRED_EFFECTS_H_
