// A DeviceTier over the engine of an EngineWorld, and device memory for it that somebody counts.
//
//   EngineWorld world;
//   TierWorld tiers(world);
//   const std::shared_ptr<Parcel> parcel = tiers.SendAway(Pattern(1, kKiB));
//   Parcel::Reader reader;
//   parcel->AddReaders(1);
//   EXPECT_EQ(tiers.Read(*parcel, reader), Pattern(1, kKiB));
//   EXPECT_EQ(tiers.live_blocks(), 0);
//
// Whoever goes before the world may hold blocks, parcels and transfers of it.

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
#include "pinion/engine/tier/device_memory.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"

namespace pinion::testing {

// A framework's allocator. The last reference to a block frees it on the block's stream, as a
// stream-ordered pool does, so the race detector sees a free that comes too early.
//
// Thread safety: thread-safe.
class CountedBlocks {
 public:
  // Allocates and frees by `device`, which outlives this.
  explicit CountedBlocks(Device& device) : device_(device) {}

  // Ready on `stream`, to which it belongs.
  DeviceMemory New(uint64_t size_bytes, StreamHandle stream);
  // Blocks that were not freed. Those that are left when nobody holds any have been leaked.
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
  std::deque<Block> blocks_ ABSL_GUARDED_BY(mu_);  // the freed ones, too
};

class TierWorld {
 public:
  // Parcels rest in pinned memory of the world's unless there is another `backing`. Without `link`
  // it is measured.
  explicit TierWorld(EngineWorld& world, std::shared_ptr<Backing> backing = nullptr);

  DeviceTier& tier() { return tier_; }
  StreamHandle stream() { return world_.compute(); }
  int live_blocks() const { return blocks_.live(); }

  // Each fails the test when a call fails. On stream(), as all below.
  DeviceMemory NewMemory(uint64_t size_bytes);
  DeviceMemory NewMemory(const std::vector<uint8_t>& bytes);  // which a kernel writes
  std::vector<uint8_t> BytesIn(const DeviceMemory& memory);   // by a kernel that reads them

  // In the world's backing.
  absl::StatusOr<std::shared_ptr<Parcel>> NewParcel(uint64_t size_bytes);
  // Bytes in new memory, and a parcel for them.
  Departure NewDeparture(const std::vector<uint8_t>& bytes);
  std::shared_ptr<Parcel> PutOut(Departure departure);
  std::shared_ptr<Parcel> PutOut(const std::vector<uint8_t>& bytes);
  std::shared_ptr<Parcel> SendAway(const std::vector<uint8_t>& bytes);  // and evicted

  // Into new memory. Lets go of what nobody is left to read.
  absl::StatusOr<Transfer> TryFetch(FetchClaim claim);
  Transfer Fetch(FetchClaim claim);
  // As a reader does: fetches unless that has been done, makes the stream wait, reads.
  absl::StatusOr<std::vector<uint8_t>> TryRead(Parcel& parcel, Parcel::Reader& reader);
  std::vector<uint8_t> Read(Parcel& parcel, Parcel::Reader& reader);

 private:
  EngineWorld& world_;
  CountedBlocks blocks_;
  DeviceTier tier_;
  const std::shared_ptr<Backing> backing_;
};

// Shares what the world owns: it outlives its borrowers.
template <typename T>
std::shared_ptr<T> Borrowed(T& owned) {
  return std::shared_ptr<T>(std::shared_ptr<void>(), &owned);
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_TIER_TIER_WORLD_H_
