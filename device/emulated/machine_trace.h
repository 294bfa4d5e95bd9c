// Records an emulated machine's timeline: streams, host ranges, stalls, device memory, and arrows
// from each copy out to the copies in that read its bytes.
//
//   host      thread 1  [step                                                       ]
//                       [forward                ][backward            ][optimizer   ]
//   emu:0     default   [aten::addmm][aten::gelu] ...
//             d2h            [copy D2H]----.
//             h2d                           `--->[copy H2D]
//             stalls                          [waits for copy H2D]
//             memory    ___/^^^\__
//
// Thread safety: none; the machine's mutex guards it.

#ifndef PINION_DEVICE_EMULATED_MACHINE_TRACE_H_
#define PINION_DEVICE_EMULATED_MACHINE_TRACE_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/types/span.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/time_model.h"
#include "pinion/device/trace/chrome_trace.h"

namespace pinion {

class MachineTrace {
 public:
  MachineTrace();

  void NameDevice(int device, const std::string& name) { trace_.NameProcess(device, name); }
  void NameStream(int device, int slot, const std::string& name) {
    trace_.NameRow(device, slot, name);
  }

  // Announce work by number. Call one of them before OnDone.
  void WillRun(uint64_t number, uint64_t size_bytes) { submitted_[number].size_bytes = size_bytes; }
  void WillCopy(uint64_t number, CopyDirection direction, absl::Span<const CopyPiece> pieces);

  void OnDone(const TimedWork& work);
  void OnStall(const TimedStall& stall);
  void OnMemory(int device, double now_ms, uint64_t in_use_bytes);
  void OnPin(double start_ms, double end_ms, uint64_t size_bytes);
  void BeginRange(const char* name, uint64_t size_bytes, double now_ms) {
    trace_.BeginRange(name, size_bytes, now_ms);
  }
  void EndRange(double now_ms) { trace_.Add(trace_.EndRange(now_ms)); }

  // Discards the timeline so far; `now_ms` becomes time 0.
  void Restart(double now_ms);

  ChromeTrace Finish() const;

 private:
  struct Submitted {
    uint64_t size_bytes = 0;
    uint64_t arrow_from = 0;
    std::set<uint64_t> arrows_to;
  };
  // Host memory by its first byte, and the last copy out that wrote it.
  struct CopiedOut {
    uintptr_t end = 0;
    uint64_t number = 0;
  };
  using CopiedOutMap = std::map<uintptr_t, CopiedOut>;

  // Returns the ranges copied out into [data, data + size_bytes). Splits ranges that cross an end.
  std::pair<CopiedOutMap::iterator, CopiedOutMap::iterator> CopiedOutInto(const void* data,
                                                                          uint64_t size_bytes);
  // Splits the range at `address`. Returns the first range from there on.
  CopiedOutMap::iterator CutAt(uintptr_t address);

  ChromeTrace trace_;
  std::map<uint64_t, Submitted> submitted_;
  CopiedOutMap copied_out_;
  std::map<int, ChromeTrace::Slice> stalls_;  // last stall by device, which may continue
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_MACHINE_TRACE_H_
