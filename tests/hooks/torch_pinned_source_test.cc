// Which device a process pins through. What it pins is tested with the host allocator.

#include "pinion/hooks/torch_pinned_source.h"

#include <set>

#include "gtest/gtest.h"

namespace pinion {
namespace {

constexpr int kDevices = 4;

int DeviceWith(const std::set<int>& contexts, int current) {
  return FirstInUse(current, kDevices, [&](int index) { return contexts.count(index) != 0; });
}

TEST(TorchPinnedSource, TheCurrentDevicePinsIfItIsInUse) {
  EXPECT_EQ(DeviceWith({0, 2}, 2), 2);
  EXPECT_EQ(DeviceWith({0, 2}, 0), 0);
}

// A loader's thread has device 0 as its current one, whatever the rank's own is.
TEST(TorchPinnedSource, NoContextIsOpenedOnTheCurrentDeviceWhereAnotherIsInUse) {
  EXPECT_EQ(DeviceWith({3}, 0), 3);
  EXPECT_EQ(DeviceWith({1, 2}, 3), 1);
}

TEST(TorchPinnedSource, TheCurrentDevicePinsWhereNoneIsInUseYet) {
  EXPECT_EQ(DeviceWith({}, 2), 2);
}

}  // namespace
}  // namespace pinion
