// Finds accesses that nothing orders, by vector clocks over byte ranges.
//
// A context is whatever runs in its own order: a stream, or the host (context 0; all its threads
// are one). Each operation is an epoch of its context. What a context has seen of the others is
// its clock; submitting an operation joins the host's clock into it, an event carries the clock of
// the stream that recorded it, and an observation joins an event's clock into the host's.
//
// Two operations are ordered if the later one's clock has reached the earlier one's epoch. If they
// touch the same bytes, one of them writes, and they are not ordered, that is a race, whatever
// happened to the bytes this time.
//
//   RaceDetector detector;
//   const int stream = detector.AddContext("emu:0/compute");
//   detector.AddMemory(data, size_bytes, stream, "allocation");
//   detector.Begin(stream, "kernel add");
//   detector.Write(other, 64);
//   for (const std::string& report : detector.TakeReports()) ...
//
// Thread safety: none. A pure data structure: addresses are only compared.

#ifndef PINION_DEVICE_EMULATED_RACE_DETECTOR_H_
#define PINION_DEVICE_EMULATED_RACE_DETECTOR_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"

namespace pinion {

// What has been seen of each context: the epoch up to which, by context.
class VectorClock {
 public:
  uint64_t Get(int context) const {
    return context < static_cast<int>(epochs_.size()) ? epochs_[context] : 0;
  }
  void Set(int context, uint64_t epoch);
  void Join(const VectorClock& other);

 private:
  absl::InlinedVector<uint64_t, 8> epochs_;
};

class RaceDetector {
 public:
  static constexpr int kHost = 0;

  RaceDetector();

  int AddContext(std::string name);

  const VectorClock& Clock(int context) const { return contexts_[context].clock; }
  void Join(int context, const VectorClock& clock) { contexts_[context].clock.Join(clock); }

  // Memory whose accesses are checked. Adding it is a write by `context`, an operation of its own:
  // its users must come after the allocation.
  void AddMemory(const void* data, uint64_t size_bytes, int context, std::string name);
  // Removing it is a write of all of it by `context`, which is joined (for this operation only)
  // with `recorded` contexts.
  void RemoveMemory(const void* data, int context, const std::vector<int>& recorded,
                    std::string name);

  // The next operation of `context`; Read and Write belong to the one that was begun last.
  // Returns its number, which names it in reports ("#12").
  uint64_t Begin(int context, std::string name);
  // Ranges outside of known memory are ignored.
  void Read(const void* data, uint64_t size_bytes) { Access(data, size_bytes, false); }
  void Write(const void* data, uint64_t size_bytes) { Access(data, size_bytes, true); }

  // Reports since the last call. A pair of operations is reported once.
  std::vector<std::string> TakeReports() { return std::exchange(reports_, {}); }

  // Pieces of memory that are told apart: what the detector's cost depends on.
  size_t span_count() const;

 private:
  struct Epoch {
    int context = kHost;
    uint64_t epoch = 0;  // 0: none
    uint64_t number = 0;
    int name = 0;
  };
  struct Span {
    uint64_t end = 0;
    Epoch write;
    std::vector<Epoch> reads;  // the latest of each context
  };
  struct Memory {
    uint64_t size_bytes = 0;
    std::map<uint64_t, Span> spans;  // by begin; they cover all of it
    size_t compact_at = 64;
  };
  struct Context {
    std::string name;
    VectorClock clock;
    uint64_t epoch = 0;
  };

  void Access(const void* data, uint64_t size_bytes, bool write);
  void AccessMemory(Memory& memory, uint64_t begin, uint64_t end, bool write);
  std::map<uint64_t, Span>::iterator SplitAt(Memory& memory, uint64_t offset);
  // Drops what the host has seen, and with it every later operation, and joins equal neighbours.
  void Compact(Memory& memory);
  bool Ordered(const Epoch& earlier) const { return clock_.Get(earlier.context) >= earlier.epoch; }
  void Report(const Memory& memory, uint64_t begin, uint64_t end, const Epoch& earlier,
              bool earlier_writes, bool write);
  int Intern(std::string name);

  std::vector<Context> contexts_;
  std::map<uintptr_t, Memory> memories_;
  uint64_t next_number_ = 1;
  Epoch current_;
  VectorClock clock_;               // of the current operation
  std::vector<uint64_t> reported_;  // numbers of operations that the current one raced with
  std::vector<std::string> reports_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, int> name_ids_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_RACE_DETECTOR_H_
