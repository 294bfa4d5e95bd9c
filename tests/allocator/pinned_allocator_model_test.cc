// Random operations checked against a model. `//tests/allocator:run_operations` runs more of them;
// allocator_fuzz searches for lists that random generation misses.

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/tests/allocator/allocator_operations.h"

namespace pinion {
namespace {

using ::pinion::testing::OperationList;
using ::pinion::testing::OperationsResult;
using ::pinion::testing::RandomOperations;
using ::pinion::testing::RunOperations;

TEST(PinnedAllocatorModelTest, RandomOperationsAgreeWithTheModel) {
  for (uint64_t seed = 1; seed <= 16; ++seed) {
    const OperationsResult result = RunOperations({RandomOperations(seed, 10000)});
    ASSERT_EQ(result.failure, "") << "seed " << seed;
    // Guards against a generator that silently stops producing some operation.
    EXPECT_GT(result.allocations, 2000u) << "seed " << seed;
    EXPECT_GT(result.deferred_releases, 100u) << "seed " << seed;
    EXPECT_GT(result.reuses, 100u) << "seed " << seed;
    EXPECT_GT(result.crossings, 500u) << "seed " << seed;
  }
}

TEST(PinnedAllocatorModelTest, ListsThatAFuzzerFoundAgreeWithTheModel) {
  int lists = 0;
  for (const auto& file : std::filesystem::directory_iterator("tests/allocator/corpus")) {
    std::ifstream bytes(file.path(), std::ios::binary);
    const OperationList list{std::istreambuf_iterator<char>(bytes),
                             std::istreambuf_iterator<char>()};
    ASSERT_EQ(RunOperations({list}).failure, "") << file.path();
    ++lists;
  }
  EXPECT_GT(lists, 10);
}

TEST(PinnedAllocatorModelTest, ThreadsThatShareAnAllocatorAgreeWithTheirModels) {
  for (uint64_t seed = 101; seed <= 108; ++seed) {
    std::vector<OperationList> lists;
    for (uint64_t thread = 0; thread < 4; ++thread) {
      lists.push_back(RandomOperations(1000 * seed + thread, 5000));
    }
    const OperationsResult result = RunOperations(lists);
    ASSERT_EQ(result.failure, "") << "seed " << seed;
    EXPECT_GT(result.allocations, 4000u) << "seed " << seed;
    EXPECT_GT(result.crossings, 200u) << "seed " << seed;
  }
}

}  // namespace
}  // namespace pinion
