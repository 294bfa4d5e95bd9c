// The timeline of an emulated machine, for people: what its streams did, what the host was at, what
// compute waited for, how much device memory was in use, and which copy in brings back what which
// copy out took away.
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
#include <string>
#include <thread>
#include <vector>

#include "absl/types/span.h"
#include "pinion/device/chrome_trace.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/time_model.h"

namespace pinion {

class MachineTrace {
 public:
  MachineTrace() : trace_("modelled by the emulated accelerator, not measured") {}

  void NameDevice(int device, const std::string& name) { trace_.NameProcess(device, name); }
  void NameStream(int device, int slot, const std::string& name) {
    trace_.NameRow(device, slot, name);
  }

  // Before the work of this number is done.
  void WillRun(uint64_t number, uint64_t size_bytes) { submitted_[number].size_bytes = size_bytes; }
  void WillCopyOut(uint64_t number, absl::Span<const CopyPiece> pieces);
  void WillCopyIn(uint64_t number, absl::Span<const CopyPiece> pieces);

  void OnDone(int device, const TimedWork& work);
  void OnStall(int device, const TimedStall& stall);
  void OnMemory(int device, double now_ms, uint64_t in_use_bytes);
  void OnPin(double start_ms, double end_ms, uint64_t size_bytes);
  void BeginRange(const char* name, uint64_t size_bytes, double now_ms);
  void EndRange(double now_ms);

  // Forgets what was before; `now_ms` becomes time 0.
  void Restart(double now_ms);

  ChromeTrace Finish() const;

 private:
  struct Submitted {
    uint64_t size_bytes = 0;
    uint64_t arrow_from = 0;
    uint64_t arrow_to = 0;
  };
  // Host memory that a copy out has written last, by its first byte.
  struct CopiedOut {
    uintptr_t end = 0;
    uint64_t number = 0;
  };
  struct OpenRange {
    const char* name;
    uint64_t size_bytes;
    double start_ms;
  };
  struct Thread {
    int row = 0;
    std::vector<OpenRange> open;
  };

  void Add(ChromeTrace::Slice slice);
  Thread& CallingThread();
  void NameHost();

  ChromeTrace trace_;
  double origin_ms_ = 0;
  std::map<uint64_t, Submitted> submitted_;
  std::map<uintptr_t, CopiedOut> copied_out_;
  std::map<int, ChromeTrace::Slice> stalls_;  // by device: the last one, which may go on
  std::map<std::thread::id, Thread> threads_;
  bool host_named_ = false;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_MACHINE_TRACE_H_
