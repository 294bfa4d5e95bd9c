// Maps stream and event handles to the emulated machine's objects. Handles are unique in the
// process, so a machine refuses those of another one.
//
// Thread safety: none; the machine's mutex guards it.

#ifndef PINION_DEVICE_EMULATED_HANDLE_TABLE_H_
#define PINION_DEVICE_EMULATED_HANDLE_TABLE_H_

#include <memory>
#include <string>
#include <unordered_map>

#include "absl/status/statusor.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/simulation.h"

namespace pinion {

class HandleTable {
 public:
  struct Stream {
    int device = 0;
    int slot = 0;  // the stream's number in the simulation
    std::string name;
    bool capturing = false;
  };
  struct Event {
    int device = 0;
    bool recorded = false;
    bool captured = false;  // last recorded in a capture
    // Moment of the last record. Default: the machine's start, which is done.
    StreamMoment moment = {};
    // Time of the last record; negative while pending. Null: an event without timing.
    std::shared_ptr<double> time_ms = {};
  };

  StreamHandle Add(Stream stream);
  // Returns the stream. InvalidArgument if it does not exist or belongs to another device.
  absl::StatusOr<Stream*> Find(int device, StreamHandle stream);
  // Returns null if the stream does not exist.
  Stream* FindOnAnyDevice(StreamHandle stream);
  void Remove(StreamHandle stream) { streams_.erase(stream.native()); }

  EventHandle Add(Event event);
  absl::StatusOr<Event*> Find(EventHandle event);
  void Remove(EventHandle event) { events_.erase(event.native()); }

 private:
  std::unordered_map<void*, Stream> streams_;
  std::unordered_map<void*, Event> events_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_HANDLE_TABLE_H_
