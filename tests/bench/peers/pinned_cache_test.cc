#include "pinion/bench/peers/pinned_cache.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/Stream.h>

#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/hooks/support/emu_fixture.h"

namespace pinion::testing {
namespace {

class PinnedCacheTest : public ::testing::Test {
 protected:
  EmuWorld world_{SlowCopies()};
  PinnedCache cache_{world_.device()};
};

TEST_F(PinnedCacheTest, MemoryIsPinnedAndRoundedToAPowerOfTwo) {
  at::Tensor tensor = cache_.Empty({3, 100}, at::kFloat);
  EXPECT_TRUE(world_.machine().IsPinned(tensor.const_data_ptr()));
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({3, 100}));
  const void* const data = tensor.const_data_ptr();
  tensor.reset();
  EXPECT_EQ(cache_.Empty({2048}, at::kByte).const_data_ptr(), data);
  EXPECT_EQ(cache_.pinned_blocks(), 1);
}

TEST_F(PinnedCacheTest, ABlockIsNotHandedOutAgainWhileACopyUsesIt) {
  const at::Tensor source = at::ones({256}, at::TensorOptions(world_.device()));
  at::Tensor host = cache_.Empty({256}, at::kFloat);
  host.copy_(source, /*non_blocking=*/true);
  cache_.UsedOn(world_.NewStream(), host);
  cache_.UsedOn(c10::Stream(c10::Stream::DEFAULT, world_.device()), host);
  const void* const data = host.const_data_ptr();
  host.reset();
  EXPECT_NE(cache_.Empty({256}, at::kFloat).const_data_ptr(), data);
  ASSERT_TRUE(world_.Synchronize().ok());
  at::Tensor one = cache_.Empty({256}, at::kFloat);
  at::Tensor other = cache_.Empty({256}, at::kFloat);
  EXPECT_TRUE(one.const_data_ptr() == data || other.const_data_ptr() == data);
  EXPECT_EQ(cache_.pinned_blocks(), 2);
}

TEST_F(PinnedCacheTest, ATensorMayOutliveTheCache) {
  at::Tensor tensor = PinnedCache(world_.device()).Empty({256}, at::kFloat);
  tensor.fill_(1);
  EXPECT_TRUE(world_.machine().IsPinned(tensor.const_data_ptr()));
}

// A detected race would abort the test.
TEST_F(PinnedCacheTest, NothingIsUnpinnedBeforeTheCopiesThatUseItAreDone) {
  const at::Tensor source = at::ones({256}, at::TensorOptions(world_.device()));
  PinnedCache(world_.device()).Empty({256}, at::kFloat).copy_(source, /*non_blocking=*/true);
  EXPECT_EQ(world_.machine().time_stats(0).copies, 1u);
}

}  // namespace
}  // namespace pinion::testing
