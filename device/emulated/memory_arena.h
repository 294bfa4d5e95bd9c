// One device's memory: real bytes in a reserved range of addresses.
//
//   MemoryArena arena(mapping, /*reserve_bytes=*/4 * limit, /*quarantine=*/false);
//   void* data = arena.Allocate(1 << 20, stream);
//   arena.Free(data, stream);          // first to be reused by `stream`
//
// Free memory is kept in one pool per stream, whose order makes it safe to reuse at once, and one
// pool for everybody. Pools split and coalesce and serve the best fit, the newest of equals. The
// range is much larger than the memory that the device has, so that fragmentation is never an
// out-of-memory error; limits are the owner's business.
//
// Thread safety: Contains is thread-safe, the rest is not.

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

// Free ranges by address and by size. Offsets into the arena.
class FreePool {
 public:
  void Add(uint64_t offset, uint64_t size_bytes);  // coalesces with its neighbours
  // Cuts `size_bytes` from the smallest range that fits. False if none does.
  bool Take(uint64_t size_bytes, uint64_t* offset);
  // Size of the range that Take would cut; 0 if none fits.
  uint64_t BestFit(uint64_t size_bytes) const;
  // Moves everything to `other`.
  void MoveTo(FreePool& other);

 private:
  struct Range {
    uint64_t size_bytes;
    uint64_t age;  // counts down: the newest is the smallest
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

  // `mapping`: readable and writable memory of `reserve_bytes`, which the arena unmaps.
  MemoryArena(void* mapping, uint64_t reserve_bytes, bool quarantine);
  ~MemoryArena();
  MemoryArena(const MemoryArena&) = delete;
  MemoryArena& operator=(const MemoryArena&) = delete;

  // Null when the reserved range has no such hole.
  // With `quarantine`, freed ranges stay unused while live bytes, they and the request together fit
  // into `capacity_bytes`.
  void* Allocate(uint64_t size_bytes, int stream, uint64_t capacity_bytes);

  // `data` came from Allocate with that size. Reusable by `stream` only, until Publish(stream).
  void Free(void* data, uint64_t size_bytes, int stream);
  // Everything that was freed on `stream` so far is now for everybody.
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

  char* const base_;
  const uint64_t reserve_bytes_;
  const bool quarantines_;
  FreePool common_;
  std::vector<FreePool> pools_;  // by stream
  std::deque<Quarantined> quarantine_;
  uint64_t quarantined_bytes_ = 0;
  uint64_t live_bytes_ = 0;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_MEMORY_ARENA_H_
