#include "pinion/tests/engine/tier/tier_world.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace {

template <typename T>
T Value(absl::StatusOr<T> result) {
  PINION_CHECK(result.ok()) << result.status().ToString();
  return *std::move(result);
}

void Ok(const absl::Status& status) { PINION_CHECK(status.ok()) << status.ToString(); }

}  // namespace

// --------------------------------------------------------------------------------------- memory

class CountedBlocks::Framework final : public DeviceMemory::Framework {
 public:
  void* data(void* owner) const override { return Of(owner).data; }
  uint64_t size_bytes(void* owner) const override { return Of(owner).size_bytes; }
  bool IsShared(void* owner) const override { return Of(owner).references.load() > 1; }
  void Share(void* owner) const override {
    PINION_CHECK(Of(owner).references.fetch_add(1) > 0) << "shared after it was freed";
  }
  void Release(void* owner) const override {
    Block& block = Of(owner);
    const int before = block.references.fetch_sub(1);
    PINION_CHECK(before > 0) << "released more often than shared";
    if (before > 1) return;
    Ok(block.blocks.device_.Free(block.data, block.stream));
    block.blocks.live_.fetch_sub(1);
  }

 private:
  static Block& Of(void* owner) { return *static_cast<Block*>(owner); }
};

DeviceMemory CountedBlocks::New(uint64_t size_bytes, StreamHandle stream) {
  static constexpr Framework kFramework;
  void* const data = Value(device_.Allocate(size_bytes, stream));
  live_.fetch_add(1);
  MutexLock lock(mu_);
  Block& block = blocks_.emplace_back(*this, data, size_bytes, stream);
  return DeviceMemory(&block, kFramework);
}

// ---------------------------------------------------------------------------------------- world

TierWorld::TierWorld(EngineWorld& world, std::shared_ptr<Backing> backing)
    : world_(world),
      blocks_(world.engine().device()),
      tier_(Borrowed(world.engine()), Borrowed(world.allocator())),
      backing_(std::move(backing)) {}

absl::StatusOr<std::shared_ptr<Parcel>> TierWorld::NewParcel(uint64_t size_bytes) {
  return tier_.NewParcelIn(backing_.get(), size_bytes, stream());
}

DeviceMemory TierWorld::NewMemory(uint64_t size_bytes) { return blocks_.New(size_bytes, stream()); }

DeviceMemory TierWorld::NewMemory(const std::vector<uint8_t>& bytes) {
  DeviceMemory memory = NewMemory(bytes.size());
  world_.WriteDevice(memory.data(), bytes, stream());
  return memory;
}

std::vector<uint8_t> TierWorld::BytesIn(const DeviceMemory& memory) {
  return world_.ReadDevice(memory.data(), memory.size_bytes(), stream());
}

Departure TierWorld::NewDeparture(const std::vector<uint8_t>& bytes) {
  Departure departure;
  departure.parcel = Value(NewParcel(bytes.size()));
  departure.memory.push_back(NewMemory(bytes));
  departure.pieces = {{departure.memory.front().data(), 0, bytes.size()}};
  return departure;
}

std::shared_ptr<Parcel> TierWorld::PutOut(Departure departure) {
  Ok(tier_.PutOut({&departure, 1}));
  return std::move(departure.parcel);
}

std::shared_ptr<Parcel> TierWorld::PutOut(const std::vector<uint8_t>& bytes) {
  return PutOut(NewDeparture(bytes));
}

std::shared_ptr<Parcel> TierWorld::SendAway(const std::vector<uint8_t>& bytes, int readers) {
  std::shared_ptr<Parcel> parcel = PutOut(bytes);
  const GuardedMemory evicted = parcel->Evict();
  parcel->AddReaders(readers);
  return parcel;
}

absl::StatusOr<Transfer> TierWorld::TryFetch(FetchClaim claim) {
  const uint64_t size_bytes = claim.parcel().size_bytes;
  std::vector<Arrival> arrivals;
  arrivals.push_back({std::move(claim), NewMemory(size_bytes)});
  GuardedMemories unneeded;
  return tier_.Fetch(absl::MakeSpan(arrivals), stream(), unneeded);
}

Transfer TierWorld::Fetch(FetchClaim claim) { return Value(TryFetch(std::move(claim))); }

absl::StatusOr<std::vector<uint8_t>> TierWorld::TryRead(Parcel& parcel, Parcel::Reader& reader) {
  while (true) {
    Parcel::Read read = parcel.ReadOrClaim(reader);
    if (read.claim.has_value()) {
      PINION_RETURN_IF_ERROR(TryFetch(*std::move(read.claim)).status());
      continue;
    }
    PINION_RETURN_IF_ERROR(read.fetched.copy().WaitOn(stream(), kReadAfterCopyIn));
    return BytesIn(read.fetched.memory());
  }
}

std::vector<uint8_t> TierWorld::Read(Parcel& parcel, Parcel::Reader& reader) {
  return Value(TryRead(parcel, reader));
}

}  // namespace pinion::testing
