// Makes pages of pinned memory inaccessible to the CPU while an emulated copy uses them.
//
//   const TwoViews views = *MapTwice(size_bytes);
//   protection.AddSegment(views, size_bytes);
//   piece = protection.Close(piece, {context, epoch}, "copy D2H #12 on emu:0/d2h");
//   protection.OpenSeen(detector.Clock(RaceDetector::kHost));
//
// Pinned memory is mapped twice. The program's view is closed and opened here; copies take effect
// through the machine's view at any time. An access to a closed page is a SIGSEGV. A handler,
// installed by the first HostProtection of the process, prints which copy the host did not wait
// for. Then the access repeats under the previous handler.
//
// Thread safety: none. The owner holds its lock while pages and copies in flight change together.

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

// One memory at two addresses.
struct TwoViews {
  void* program = nullptr;
  void* machine = nullptr;
};

// Maps `size_bytes` (whole pages) of zeroed memory at two addresses, readable and writable. The
// caller unmaps both views. ResourceExhausted if the host lacks the memory.
absl::StatusOr<TwoViews> MapTwice(uint64_t size_bytes);

class HostProtection {
 public:
  // A copy's epoch in the race detector's context of its stream.
  struct Moment {
    int context = 0;
    uint64_t epoch = 0;
  };

  HostProtection();
  ~HostProtection();  // removes all segments, and unmaps their machine views
  HostProtection(const HostProtection&) = delete;
  HostProtection& operator=(const HostProtection&) = delete;

  void AddSegment(const TwoViews& views, uint64_t size_bytes);
  // Opens the segment, even during copies. The caller unmaps the returned machine view.
  void* RemoveSegment(const void* program);

  // Closes the pages that lie entirely inside the piece: the destination to all accesses, the
  // source to writes. They reopen when OpenSeen learns that the host has seen `copy`. Memory
  // outside of segments is ignored. `what` names the copy in messages. Returns the piece with
  // machine addresses.
  CopyPiece Close(const CopyPiece& piece, Moment copy, const std::string& what);
  void OpenSeen(const VectorClock& host);

 private:
  struct PageUse {  // copies in flight
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
    int note = -1;  // index of the handler's note; -1: the table was full
  };
  static int AllowedAccess(const PageUse& use);
  // Closes one end of a piece. Returns its machine address, or `data` outside of segments.
  void* CloseEnd(void* data, uint64_t size_bytes, bool written, Moment copy,
                 const std::string& what);
  // Adds `copies` to the counts of the pages, and sets the CPU's access accordingly.
  void Use(const Closed& closed, int copies);
  void Open(const Closed& closed);

  std::map<uintptr_t, Segment> segments_;  // by the program's address
  std::vector<Closed> closed_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_HOST_PROTECTION_H_
