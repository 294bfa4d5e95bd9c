// Finds unordered accesses to memory, by vector clocks over byte ranges.
//
//   RaceDetector detector;
//   const int stream = detector.AddContext("emu:0/compute");
//   detector.AddMemory(data, size_bytes, stream, "allocation");
//   detector.Begin(stream, "kernel add");
//   detector.Write(other, 64);
//   for (const std::string& report : detector.TakeReports()) ...
//
// A context is a sequence of operations: a stream, or the host (context 0, all its threads
// together). Each operation is an epoch of its context. A context's clock holds the epochs of other
// contexts that it has seen. Submitting joins the host's clock into the stream's. An event carries
// its stream's clock; an observation joins it into the host's.
//
// Two operations are ordered if the later clock has reached the earlier epoch. Two unordered
// operations on the same bytes, one of them a write, are a race, whatever happened to the bytes
// this time.
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

// The last epoch seen of each context.
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

  // Adds memory to check. Counts as a write by `context`, an operation of its own: later accesses
  // must be ordered after it.
  void AddMemory(const void* data, uint64_t size_bytes, int context, std::string name);
  // Removes memory. Counts as a write of all its bytes by `context`; this operation is also ordered
  // after the `recorded` contexts.
  void RemoveMemory(const void* data, int context, const std::vector<int>& recorded,
                    std::string name);

  // Begins the next operation of `context`; later Read and Write calls belong to it. Returns its
  // number, which reports print ("#12").
  uint64_t Begin(int context, std::string name);
  // Check an access. Ranges outside of known memory are ignored.
  void Read(const void* data, uint64_t size_bytes) { Access(data, size_bytes, false); }
  void Write(const void* data, uint64_t size_bytes) { Access(data, size_bytes, true); }

  // Returns the reports since the last call. Each pair of operations is reported once.
  std::vector<std::string> TakeReports() { return std::exchange(reports_, {}); }

  // Returns the number of separate byte ranges, which determines the detector's cost.
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
    std::vector<Epoch> reads;  // the latest read of each context
  };
  struct Memory {
    uint64_t size_bytes = 0;
    std::map<uint64_t, Span> spans;  // by begin; together they cover the memory
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
  // Drops epochs that the host has seen, because every later operation has seen them too, and
  // merges equal neighbours.
  void Compact(Memory& memory);
  bool Ordered(const Epoch& earlier) const { return clock_.Get(earlier.context) >= earlier.epoch; }
  void Report(const Memory& memory, uint64_t begin, uint64_t end, const Epoch& earlier,
              bool earlier_writes, bool write);
  int Intern(std::string name);

  std::vector<Context> contexts_;
  std::map<uintptr_t, Memory> memories_;
  uint64_t next_number_ = 1;
  Epoch current_;
  VectorClock clock_;               // clock of the current operation
  std::vector<uint64_t> reported_;  // operations that raced with the current one
  std::vector<std::string> reports_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, int> name_ids_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_RACE_DETECTOR_H_
