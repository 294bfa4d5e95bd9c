// A DeviceTier on the engine of an EngineWorld, with counted device memory.
//
//   EngineWorld world;
//   TierWorld tiers(world);
//   const std::shared_ptr<Parcel> parcel = tiers.SendAway(Pattern(1, kKiB), /*readers=*/1);
//   Parcel::Reader reader;
//   EXPECT_EQ(tiers.Read(*parcel, reader), Pattern(1, kKiB));
//   EXPECT_EQ(tiers.live_blocks(), 0);
//
// Blocks, parcels and transfers must not outlive the world.

#ifndef PINION_TESTS_ENGINE_TIER_TIER_WORLD_H_
#define PINION_TESTS_ENGINE_TIER_TIER_WORLD_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device.h"
#include "pinion/engine/tier/backing.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"

namespace pinion::testing {

// A framework's allocator. The last reference to a block frees it on the block's stream, as in a
// stream-ordered pool, so the race detector sees a free that comes too early.
//
// Thread safety: thread-safe.
class CountedBlocks {
 public:
  // Uses `device`, which must outlive this object.
  explicit CountedBlocks(Device& device) : device_(device) {}

  // Returns memory that is ready on `stream` and belongs to it.
  DeviceMemory New(uint64_t size_bytes, StreamHandle stream);
  // Returns the blocks that were not freed; without references these are leaks.
  int live() const { return live_.load(); }

 private:
  struct Block {
    Block(CountedBlocks& owner, void* address, uint64_t bytes, StreamHandle of)
        : blocks(owner), data(address), size_bytes(bytes), stream(of) {}

    CountedBlocks& blocks;
    void* const data;
    const uint64_t size_bytes;
    const StreamHandle stream;
    std::atomic<int> references{1};
  };
  class Framework;

  Device& device_;
  std::atomic<int> live_{0};
  Mutex mu_;
  std::deque<Block> blocks_ ABSL_GUARDED_BY(mu_);  // including freed ones
};

class TierWorld {
 public:
  // Parcels rest in the world's pinned memory, or in `backing`.
  explicit TierWorld(EngineWorld& world, std::shared_ptr<Backing> backing = nullptr);

  DeviceTier& tier() { return tier_; }
  StreamHandle stream() { return world_.compute(); }
  int live_blocks() const { return blocks_.live(); }

  // All run on stream(), and fail the test if a call fails.
  DeviceMemory NewMemory(uint64_t size_bytes);
  DeviceMemory NewMemory(const std::vector<uint8_t>& bytes);  // written by a kernel
  std::vector<uint8_t> BytesIn(const DeviceMemory& memory);   // read by a kernel

  // Uses the world's backing.
  absl::StatusOr<std::shared_ptr<Parcel>> NewParcel(uint64_t size_bytes);
  // Returns new memory with these bytes and a parcel for it.
  Departure NewDeparture(const std::vector<uint8_t>& bytes);
  std::shared_ptr<Parcel> PutOut(Departure departure);
  std::shared_ptr<Parcel> PutOut(const std::vector<uint8_t>& bytes);
  // Evicts it, too, and gives it this number of readers.
  std::shared_ptr<Parcel> SendAway(const std::vector<uint8_t>& bytes, int readers = 0);

  // Fetches into new memory. Frees what has no reader left.
  absl::StatusOr<Transfer> TryFetch(FetchClaim claim);
  Transfer Fetch(FetchClaim claim);
  // Reads as a reader does: fetches if needed, makes the stream wait, and reads.
  absl::StatusOr<std::vector<uint8_t>> TryRead(Parcel& parcel, Parcel::Reader& reader);
  std::vector<uint8_t> Read(Parcel& parcel, Parcel::Reader& reader);

 private:
  EngineWorld& world_;
  CountedBlocks blocks_;
  DeviceTier tier_;
  const std::shared_ptr<Backing> backing_;
};

// Returns a non-owning pointer: the world outlives its users.
template <typename T>
std::shared_ptr<T> Borrowed(T& owned) {
  return std::shared_ptr<T>(std::shared_ptr<void>(), &owned);
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_TIER_TIER_WORLD_H_
