// Waits between streams, like torch.Stream's, on any device.

#ifndef PINION_BENCH_PEERS_PEER_STREAMS_H_
#define PINION_BENCH_PEERS_PEER_STREAMS_H_

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace pinion {

inline c10::Stream NewStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getNewStream(device, /*priority=*/0);
}

// Records an event behind the current work of `stream`.
inline c10::Event RecordEvent(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

// Orders later work of `stream` behind the current work of `other`.
inline void WaitFor(const c10::Stream& stream, const c10::Stream& other) {
  RecordEvent(other).block(stream);
}

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_PEER_STREAMS_H_
