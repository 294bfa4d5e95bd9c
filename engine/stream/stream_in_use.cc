#include "pinion/engine/stream/stream_in_use.h"

namespace pinion {
namespace {

thread_local StreamInUse* innermost = nullptr;

}  // namespace

StreamInUse::StreamInUse(const Device& device, StreamHandle stream)
    : device_(device),
      stream_(stream),
      captures_nothing_(stream == StreamHandle(nullptr)),
      outer_(innermost) {
  innermost = this;
}

StreamInUse::~StreamInUse() { innermost = outer_; }

bool StreamInUse::IsKnownNotToCapture(const Device& device, StreamHandle stream) {
  return innermost != nullptr && innermost->IsOf(device, stream) && innermost->captures_nothing_;
}

void StreamInUse::NoteNotCapturing(const Device& device, StreamHandle stream) {
  if (innermost != nullptr && innermost->IsOf(device, stream)) innermost->captures_nothing_ = true;
}

}  // namespace pinion
