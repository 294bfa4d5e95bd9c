// Checks the bytes that an allocator reports beyond the storages that a step's record knows.

#include "pinion/hooks/plan/known_storages.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;

c10::Storage NewStorage(int64_t bytes) { return at::empty({bytes}, at::kByte).storage(); }

class KnownStoragesTest : public ::testing::Test {
 protected:
  // Returns the other bytes when `allocated_bytes` are in use on the device.
  int64_t OtherBytesOf(int64_t allocated_bytes) {
    return storages_.OtherBytes(storages_.CountAt(allocated_bytes));
  }

  KnownStorages storages_;
};

TEST_F(KnownStoragesTest, WhatNobodyHoldsIsAmongTheOtherBytes) {
  const c10::Storage storage = NewStorage(400);
  const KnownStorages::Id id = storages_.FindOrAdd(storage);
  EXPECT_EQ(OtherBytesOf(1000), 1000);
  storages_.Hold(id);
  EXPECT_EQ(OtherBytesOf(1000), 1000 - 512) << "as an allocator counts it";
  storages_.Release(id);
  EXPECT_EQ(OtherBytesOf(1000), 1000);
}

TEST_F(KnownStoragesTest, WhatSeveralHoldCountsOnceUntilTheLastLetsGo) {
  const c10::Storage storage = NewStorage(400);
  const KnownStorages::Id id = storages_.FindOrAdd(storage);
  storages_.Hold(id);
  storages_.Hold(id);
  EXPECT_EQ(OtherBytesOf(1000), 1000 - 512);
  storages_.Release(id);
  EXPECT_EQ(OtherBytesOf(1000), 1000 - 512);
  storages_.Release(id);
  EXPECT_EQ(OtherBytesOf(1000), 1000);
}

using KnownStoragesDeathTest = KnownStoragesTest;

TEST_F(KnownStoragesDeathTest, WhatNobodyHoldsIsNotReleased) {
  const KnownStorages::Id id = storages_.FindOrAdd(NewStorage(400));
  EXPECT_DEATH(storages_.Release(id), "nobody holds");
}

TEST_F(KnownStoragesTest, AStorageIsKnownOnce) {
  const c10::Storage storage = NewStorage(400);
  const KnownStorages::Id id = storages_.FindOrAdd(storage);
  storages_.objects(id).push_back(7);
  EXPECT_EQ(storages_.FindOrAdd(storage), id);
  EXPECT_THAT(storages_.objects(id), ElementsAre(7));
  EXPECT_EQ(storages_.size(), 1u);
  EXPECT_EQ(storages_.CountAt(1000).known, 512) << "as an allocator counts it";
}

TEST_F(KnownStoragesTest, AStorageThatIsGoneHoldsNothingAndIsNotMistakenForALaterOne) {
  KnownStorages::Id gone;
  {
    const c10::Storage storage = NewStorage(400);
    gone = storages_.FindOrAdd(storage);
    storages_.objects(gone).push_back(7);
    storages_.Hold(gone);
    EXPECT_EQ(OtherBytesOf(1000), 1000 - 512);
    EXPECT_FALSE(storages_.IsGone(gone));
  }
  EXPECT_TRUE(storages_.IsGone(gone));
  EXPECT_EQ(storages_.CountAt(1000).known, 0);
  EXPECT_EQ(OtherBytesOf(1000), 1000);

  std::set<KnownStorages::Id> later;
  for (int i = 0; i < 100; ++i) later.insert(storages_.FindOrAdd(NewStorage(400)));
  EXPECT_EQ(later.size(), 100u);
  EXPECT_FALSE(later.contains(gone));
  EXPECT_THAT(storages_.objects(gone), ElementsAre(7));

  // A handle may outlive its memory.
  storages_.Release(gone);
  EXPECT_EQ(OtherBytesOf(1000), 1000);
}

TEST_F(KnownStoragesTest, WhatIsToldToBeFreedCountsNoMore) {
  const c10::Storage stays = NewStorage(400);
  c10::Storage goes = NewStorage(400);
  storages_.FindOrAdd(stays);
  storages_.Hold(storages_.FindOrAdd(goes));
  const std::vector<const void*> freed = {&storages_, goes.data()};
  goes = c10::Storage();
  const KnownStorages::Bytes end = storages_.CountAfter(1000, freed);
  EXPECT_EQ(end.known, 512);
  EXPECT_EQ(storages_.OtherBytes(end), 1000);
}

TEST_F(KnownStoragesTest, OfManyThatHaveGoneOnlyThoseThatAreToldAreLookedAt) {
  std::vector<c10::Storage> many;
  std::vector<const void*> data;
  for (int i = 0; i < 100; ++i) {
    many.push_back(NewStorage(400));
    data.push_back(many.back().data());
    storages_.FindOrAdd(many.back());
  }
  many.clear();
  EXPECT_EQ(storages_.CountAfter(1000, {}).known, 100 * 512);
  EXPECT_EQ(storages_.CountAfter(1000, {data[7]}).known, 99 * 512);
  EXPECT_EQ(storages_.CountAt(1000).known, 0) << "which looks at all";
}

TEST_F(KnownStoragesTest, AStorageWhoseMemoryWasExchangedIsLookedAtUntilItGoes) {
  c10::Storage storage = NewStorage(400);
  storages_.FindOrAdd(storage);
  const void* const first = storage.data();
  storage.set_data_ptr(c10::GetCPUAllocator()->allocate(400));
  EXPECT_EQ(storages_.CountAfter(1000, {first}).known, 512);
  storage = c10::Storage();
  EXPECT_EQ(storages_.CountAfter(1000, {}).known, 0);
}

TEST_F(KnownStoragesTest, MemoryThatIsNotTheAllocatorsIsLookedAtUntilItGoes) {
  char memory[400];
  c10::Storage storage(c10::Storage::use_byte_size_t(), sizeof(memory),
                       c10::DataPtr(memory, c10::kCPU));
  storages_.FindOrAdd(storage);
  EXPECT_EQ(storages_.CountAfter(1000, {}).known, 512);
  storage = c10::Storage();
  EXPECT_EQ(storages_.CountAfter(1000, {}).known, 0);
}

TEST_F(KnownStoragesTest, WhoseMemoryAnotherStorageHasByNowIsLookedAtUntilItGoes) {
  c10::Storage first = NewStorage(400);
  storages_.FindOrAdd(first);
  c10::Storage second = NewStorage(400);
  second.set_data_ptr(first.set_data_ptr(c10::GetCPUAllocator()->allocate(400)));
  storages_.FindOrAdd(second);
  first = c10::Storage();
  EXPECT_EQ(storages_.CountAfter(1000, {}).known, 512);
  const void* const data = second.data();
  second = c10::Storage();
  EXPECT_EQ(storages_.CountAfter(1000, {data}).known, 0);
}

TEST_F(KnownStoragesTest, WhatIsFetchedIsNoneOfTheOtherBytesAheadOfItsReadAndAfterIt) {
  const KnownStorages::Bytes begin = storages_.CountAt(1000);
  const c10::Storage fetched = NewStorage(300);
  const KnownStorages::Bytes end = storages_.CountAt(1512);
  storages_.NoteAllocations(begin, end);
  EXPECT_EQ(storages_.OtherBytes(end), 1000);
  for (int reads = 0; reads < 2; ++reads) {
    storages_.NoteRead(fetched, /*reader_keeps=*/false);
    EXPECT_EQ(OtherBytesOf(1512), 1000);
  }
}

TEST_F(KnownStoragesTest, WhatIsKnownAndLetGoOfWasNotFetched) {
  c10::Storage storage = NewStorage(400);
  storages_.Hold(storages_.FindOrAdd(storage));
  const KnownStorages::Bytes begin = storages_.CountAt(1000);
  storage = c10::Storage();
  const KnownStorages::Bytes end = storages_.CountAt(488);
  storages_.NoteAllocations(begin, end);
  EXPECT_EQ(storages_.OtherBytes(end), 488);
}

TEST_F(KnownStoragesTest, ToReadWhatIsOnTheDeviceChangesNothing) {
  const c10::Storage storage = NewStorage(400);
  storages_.Hold(storages_.FindOrAdd(storage));
  storages_.NoteRead(storage, /*reader_keeps=*/false);
  EXPECT_EQ(OtherBytesOf(1000), 1000 - 512);
}

}  // namespace
}  // namespace pinion
