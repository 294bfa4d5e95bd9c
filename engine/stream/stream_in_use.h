// The stream that an operator, or a node of a backward, runs on: within it, whether the stream
// captures a graph is asked once.
//
//   const StreamInUse in_use(engine->device(), stream);   // in a hook that the operator has called
//   engine->IsCapturing(stream);                          // asks the device
//   engine->Submit(batch, stream);                        // knows by now
//
// Nobody begins a capture on a stream while an operator runs on it on another thread: the
// operator's kernels would fall into the graph, or not, as it happens. So "no" stays true until the
// operator goes on. For the same reason CUDA's legacy default stream, the one whose handle is null,
// is not asked at all. It captures nothing itself, and to ask tells whether a stream that
// synchronises with it does, whose capture the operator's kernels spoil anyway. Whoever is not
// called by an operator, the destructor of a graph for example, has no such object, and asks.
//
// Thread safety: belongs to the thread that makes it; the innermost one counts.

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

  // Whether it is known that the stream captures nothing, since the calling thread uses it.
  static bool IsKnownNotToCapture(const Device& device, StreamHandle stream);
  // The device has been asked, and has said no.
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
