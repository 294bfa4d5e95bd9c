#include "pinion/engine/copy_batch.h"

#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/engine/engine_world.h"

namespace pinion::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

char device_memory[1024];

TEST(CopyBatchTest, PiecesPointTheWayOfTheDirection) {
  EngineWorld world;
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(512);
  CopyBatch out(CopyDirection::kDeviceToHost);
  out.Add(host, 128, device_memory, 64);
  CopyBatch in(CopyDirection::kHostToDevice);
  in.Add(host, 128, device_memory, 64);

  ASSERT_THAT(out.pieces(), SizeIs(1));
  EXPECT_EQ(out.pieces()[0].dst, static_cast<char*>(host->data()) + 128);
  EXPECT_EQ(out.pieces()[0].src, device_memory);
  ASSERT_THAT(in.pieces(), SizeIs(1));
  EXPECT_EQ(in.pieces()[0].dst, device_memory);
  EXPECT_EQ(in.pieces()[0].src, static_cast<char*>(host->data()) + 128);
}

TEST(CopyBatchTest, ListsTheBuffersOfItsPiecesAndAddsUpTheBytes) {
  EngineWorld world;
  const std::shared_ptr<HostBuffer> a = world.NewHostBuffer(512);
  const std::shared_ptr<HostBuffer> b = world.NewHostBuffer(512);
  CopyBatch batch(CopyDirection::kDeviceToHost);
  EXPECT_TRUE(batch.empty());
  batch.Add(a, 0, device_memory, 100);
  batch.Add(b, 0, device_memory + 100, 200);
  batch.Add(b, 200, device_memory + 300, 300);
  EXPECT_THAT(batch.buffers(), ElementsAre(a, b));
  EXPECT_EQ(batch.size_bytes(), 600u);
}

TEST(CopyBatchDeathTest, RefusesBytesOutsideOfTheBuffer) {
  EngineWorld world;
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(512);
  CopyBatch batch(CopyDirection::kDeviceToHost);
  EXPECT_DEATH(batch.Add(host, 500, device_memory, 13), "of a host buffer of 512 bytes");
  // The sum of offset and size overflows.
  EXPECT_DEATH(batch.Add(host, UINT64_MAX, device_memory, 2), "of a host buffer of 512 bytes");
  EXPECT_DEATH(batch.Add(host, 0, device_memory, 0), "an empty piece; leave it out");
  EXPECT_DEATH(batch.Add(nullptr, 0, device_memory, 17),
               "of 17 bytes: the host buffer is null; pass");
  EXPECT_DEATH(batch.Add(host, 0, nullptr, 17), "of 17 bytes: the device memory is null; pass");
}

}  // namespace
}  // namespace pinion::testing
