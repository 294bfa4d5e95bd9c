// Waits between streams, like torch.Stream's, on any device.

#ifndef PINION_BENCH_PEERS_PEER_STREAMS_H_
#define PINION_BENCH_PEERS_PEER_STREAMS_H_

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "pinion/hooks/autograd/torch_bridge.h"

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

// The two streams of TrlOffload and their waits, logged to TrlOptions::log.
class TrlStreams {
 public:
  enum Side { kCompute, kComm };  // kCompute is the calling thread's stream

  struct Record {
    c10::Event event;
    int64_t number;  // counts records of both streams
  };

  TrlStreams(c10::Device device, std::function<void(const std::string&)> log)
      : device_(device), comm_(NewStream(device)), log_(std::move(log)) {}

  template <typename... Parts>
  void Log(const Parts&... parts) const {
    if (log_ != nullptr) log_(absl::StrCat(parts...));
  }

  c10::Stream Of(Side side) const { return side == kComm ? comm_ : CurrentStream(device_); }

  Record RecordOn(Side side) {
    Log(Name(side), " records");
    return {RecordEvent(Of(side)), ++records_};
  }
  void WaitsFor(Side side, const Record& record) const {
    Log(Name(side), " waits for record ", record.number);
    record.event.block(Of(side));
  }
  void WaitsForOther(Side side) const {
    const Side other = side == kComm ? kCompute : kComm;
    Log(Name(side), " waits for ", Name(other));
    WaitFor(Of(side), Of(other));
  }

  // Blocks the host.
  void Synchronize() const {
    for (const Side side : {kCompute, kComm}) {
      Log(Name(side), " synchronizes");
      Of(side).synchronize();
    }
  }

 private:
  static const char* Name(Side side) { return side == kComm ? "comm" : "compute"; }

  const c10::Device device_;
  const c10::Stream comm_;
  const std::function<void(const std::string&)> log_;
  int64_t records_ = 0;
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_PEER_STREAMS_H_
