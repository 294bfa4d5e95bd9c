// Closes pages of pinned memory to the CPU while a copy uses them.
//
// Pinned memory is mapped twice: the program's view, whose pages are closed and opened here, and
// the machine's own, through which copies take effect whenever their schedule says so.
//
//   const TwoViews views = *MapTwice(size_bytes);
//   protection.AddSegment(views, size_bytes);
//   piece = protection.Close(piece, {context, epoch}, "copy D2H #12 on emu:0/d2h");
//   protection.OpenSeen(detector.Clock(RaceDetector::kHost));
//
// An access to a closed page is a SIGSEGV. A handler, which the first HostProtection of the process
// installs, says on stderr which copy the host did not wait for; then the access is repeated under
// the handler that was there before.
//
// Thread safety: none. The owner's lock is held while pages are opened and closed: they must change
// together with what is in flight.

#ifndef PINION_DEVICE_EMULATED_HOST_PROTECTION_H_
#define PINION_DEVICE_EMULATED_HOST_PROTECTION_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/race_detector.h"

namespace pinion {

// The same memory at two addresses.
struct TwoViews {
  void* program = nullptr;
  void* machine = nullptr;
};

// Zeroed, readable and writable. `size_bytes` are whole pages; the caller unmaps both views.
// ResourceExhausted if the host has no such memory.
absl::StatusOr<TwoViews> MapTwice(uint64_t size_bytes);

class HostProtection {
 public:
  // The epoch of a copy in the context of its stream.
  struct Moment {
    int context = 0;
    uint64_t epoch = 0;
  };

  HostProtection();
  ~HostProtection();  // removes all segments, and unmaps the machine's view of them
  HostProtection(const HostProtection&) = delete;
  HostProtection& operator=(const HostProtection&) = delete;

  void AddSegment(const TwoViews& views, uint64_t size_bytes);
  // Opens all of it, whatever is in flight. Returns the machine's view, to be unmapped.
  void* RemoveSegment(const void* program);

  // Until OpenSeen learns that the host has seen `copy`, closes the pages that lie entirely inside
  // of the piece: its destination to all accesses, its source to writes. What is not in a segment
  // is left alone. `what` names the copy in the message. Returns the piece with the machine's
  // addresses.
  CopyPiece Close(const CopyPiece& piece, Moment copy, const std::string& what);
  void OpenSeen(const VectorClock& host);

 private:
  struct PageUse {  // by copies in flight
    int writers = 0;
    int readers = 0;
  };
  struct Segment {
    char* machine = nullptr;
    uint64_t size_bytes = 0;
    std::vector<PageUse> pages;
  };
  struct Closed {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    bool written = false;
    Moment copy;
    int note = -1;  // the handler's; -1: it had no room
  };
  static int AllowedAccess(const PageUse& use);
  // Closes one end of a piece. Returns the machine's address of it, `data` if it is in no segment.
  void* CloseEnd(void* data, uint64_t size_bytes, bool written, Moment copy,
                 const std::string& what);
  // Counts `copies` more copies in the pages, and allows the CPU what the new counts do.
  void Use(const Closed& closed, int copies);
  void Open(const Closed& closed);

  std::map<uintptr_t, Segment> segments_;  // by the program's address
  std::vector<Closed> closed_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_HOST_PROTECTION_H_
