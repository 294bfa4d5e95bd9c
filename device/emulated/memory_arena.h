// Allocates one emulated device's memory: real bytes in a reserved range of addresses.
//
//   MemoryArena arena(mapping, /*reserve_bytes=*/4 * limit, /*quarantine=*/false);
//   void* data = arena.Allocate(size_bytes, stream, capacity_bytes);
//   arena.Free(data, size_bytes, stream);          // first reused by `stream`
//
// Freed memory goes to its stream's pool, whose order makes immediate reuse safe, or to a common
// pool. Pools split, coalesce, and serve the best fit, the newest among equals. The range is much
// larger than the device's memory, so fragmentation causes no out-of-memory error. The owner
// enforces limits.
//
// Thread safety: Contains is thread-safe, everything else is not.

#ifndef PINION_DEVICE_EMULATED_MEMORY_ARENA_H_
#define PINION_DEVICE_EMULATED_MEMORY_ARENA_H_

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "pinion/device/allocation_bytes.h"

namespace pinion {

// Free ranges by address and by size, as offsets into the arena.
class FreePool {
 public:
  void Add(uint64_t offset, uint64_t size_bytes);  // merges with neighbours
  // Cuts `size_bytes` from the smallest range that fits. Returns false if none does.
  bool Take(uint64_t size_bytes, uint64_t* offset);
  // Returns the size of the range that Take would cut; 0 if none fits.
  uint64_t BestFit(uint64_t size_bytes) const;
  // Moves everything to `other`.
  void MoveTo(FreePool& other);

 private:
  struct Range {
    uint64_t size_bytes;
    uint64_t age;  // counts down: the newest range has the smallest age
  };
  using ByOffset = std::map<uint64_t, Range>;
  using SizeKey = std::tuple<uint64_t, uint64_t, uint64_t>;  // size, age, offset

  static SizeKey Key(ByOffset::const_iterator it) {
    return {it->second.size_bytes, it->second.age, it->first};
  }
  void Erase(ByOffset::iterator it);

  ByOffset by_offset_;
  std::set<SizeKey> by_size_;
  uint64_t next_age_ = UINT64_MAX;
};

class MemoryArena {
 public:
  static constexpr uint64_t kAlignment = kAllocationGranularityBytes;

  // Takes ownership of `mapping`: `reserve_bytes` of private memory, which need not be accessible.
  MemoryArena(void* mapping, uint64_t reserve_bytes, bool quarantine);
  ~MemoryArena();
  MemoryArena(const MemoryArena&) = delete;
  MemoryArena& operator=(const MemoryArena&) = delete;

  // Returns memory, or null if the reserved range has no fitting hole or the host refuses memory.
  // With `quarantine`, freed ranges stay unused while they, live bytes and the request fit into
  // `capacity_bytes`.
  void* Allocate(uint64_t size_bytes, int stream, uint64_t capacity_bytes);

  // Frees `data` of that size. Only `stream` may reuse it until Publish(stream).
  void Free(void* data, uint64_t size_bytes, int stream);
  // Makes all memory freed on `stream` so far available to every stream.
  void Publish(int stream);
  int stream_count() const { return static_cast<int>(pools_.size()); }

  bool Contains(const void* data) const { return data >= base_ && data < base_ + reserve_bytes_; }

 private:
  struct Quarantined {
    uint64_t offset;
    uint64_t size_bytes;
    int stream;
  };
  FreePool& PoolOf(int stream);
  // Makes [0, end) readable and writable. Under strict overcommit the host may refuse.
  bool MakeWritable(uint64_t end);

  char* const base_;
  const uint64_t reserve_bytes_;
  uint64_t writable_bytes_ = 0;  // from the beginning
  const bool quarantines_;
  FreePool common_;
  std::vector<FreePool> pools_;  // by stream
  std::deque<Quarantined> quarantine_;
  uint64_t quarantined_bytes_ = 0;
  uint64_t live_bytes_ = 0;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_MEMORY_ARENA_H_
