// Caches, for the operator or backward node that runs on this thread, that its stream captures no
// CUDA graph.
//
//   const StreamInUse in_use(engine->device(), stream);   // in a hook that the operator has called
//   engine->IsCapturing(stream);                          // asks the device
//   engine->Submit(batch, stream);                        // reuses the answer
//
// No other thread can begin a useful capture on a stream while an operator runs on it, so "no"
// holds until the operator continues. CUDA's legacy default stream (null handle) is never asked. It
// captures nothing itself; asking only reports captures of blocking streams, which the operator's
// kernels break anyway. Code outside of operators, for example a graph's destructor, has no such
// object and asks the device.
//
// Thread safety: belongs to the thread that makes it; the innermost object counts.

#ifndef PINION_ENGINE_STREAM_STREAM_IN_USE_H_
#define PINION_ENGINE_STREAM_STREAM_IN_USE_H_

#include "pinion/device/device.h"

namespace pinion {

class [[nodiscard]] StreamInUse {
 public:
  [[nodiscard]] StreamInUse(const Device& device, StreamHandle stream);
  ~StreamInUse();
  StreamInUse(const StreamInUse&) = delete;
  StreamInUse& operator=(const StreamInUse&) = delete;

  // Returns true if the calling thread's innermost object knows that `stream` captures nothing.
  static bool IsKnownNotToCapture(const Device& device, StreamHandle stream);
  // Stores the device's answer that `stream` captures nothing.
  static void NoteNotCapturing(const Device& device, StreamHandle stream);

 private:
  bool IsOf(const Device& device, StreamHandle stream) const {
    return &device == &device_ && stream == stream_;
  }

  const Device& device_;
  const StreamHandle stream_;
  bool captures_nothing_;
  StreamInUse* const outer_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_STREAM_STREAM_IN_USE_H_
