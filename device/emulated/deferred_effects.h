// The values of copies: when their bytes really move.
//
// A copy is submitted to its stream and takes effect later, in the order of the stream and after
// what the stream waited for. It reads its source at that moment, so a program that changes or
// recycles a buffer too early sees wrong bytes, as on a real device. Kernels take effect when they
// are submitted and need no entry here: their caller forces their stream first.
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

// What the seq-th entry of a stream, and all before it, stands for. Entries count from 1.
struct StreamPoint {
  int stream = 0;
  uint64_t seq = 0;
};

class DeferredEffects {
 public:
  explicit DeferredEffects(uint64_t seed) : random_(seed) {}

  // `stream`s are small numbers; `seq` rises within a stream.
  void AddCopy(StreamPoint at, std::vector<CopyPiece> pieces);
  // Nothing of the stream from here on ever takes effect.
  void AddObstacle(StreamPoint at);
  void AddWait(StreamPoint at, StreamPoint waited_for);

  // Applies everything up to `point` and all that it depends on. False if an obstacle is in the
  // way: what could be applied has been.
  bool Force(StreamPoint point);

  // Applies some of what may legally take effect now.
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
