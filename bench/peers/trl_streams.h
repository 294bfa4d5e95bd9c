// The two streams of TrlOffload and their waits, logged to TrlOptions::log.
//
// Thread safety: as TrlOffload.

#ifndef PINION_BENCH_PEERS_TRL_STREAMS_H_
#define PINION_BENCH_PEERS_TRL_STREAMS_H_

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/bench/peers/peer_streams.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

class TrlStreams {
 public:
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

  c10::Stream compute() const { return CurrentStream(device_); }  // the calling thread's
  c10::Stream comm() const { return comm_; }

  Record RecordCompute() {
    Log("compute records");
    return {RecordEvent(compute()), ++records_};
  }
  Record RecordComm() {
    Log("comm records");
    return {RecordEvent(comm_), ++records_};
  }

  void ComputeWaitsFor(const Record& record) const {
    Log("compute waits for record ", record.number);
    record.event.block(compute());
  }
  void CommWaitsFor(const Record& record) const {
    Log("comm waits for record ", record.number);
    record.event.block(comm_);
  }
  void CommWaitsForCompute() const {
    Log("comm waits for compute");
    WaitFor(comm_, compute());
  }
  void ComputeWaitsForComm() const {
    Log("compute waits for comm");
    WaitFor(compute(), comm_);
  }

  // Blocks the host.
  void Synchronize() const {
    Log("compute synchronizes");
    compute().synchronize();
    Log("comm synchronizes");
    comm_.synchronize();
  }

 private:
  const c10::Device device_;
  const c10::Stream comm_;
  const std::function<void(const std::string&)> log_;
  int64_t records_ = 0;
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_TRL_STREAMS_H_
