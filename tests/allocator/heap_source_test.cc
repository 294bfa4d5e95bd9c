#include "pinion/allocator/os/heap_source.h"

#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::HasSubstr;

TEST(HeapSourceTest, SegmentsAreAlignedAndWritable) {
  HeapSource source;
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source.Allocate(kMiB));
  EXPECT_EQ(segment.size_bytes, kMiB);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(segment.data) % source.granularity_bytes(), 0u);
  std::memset(segment.data, 1, segment.size_bytes);
  EXPECT_THAT(source.Free(segment), IsOk());
}

TEST(HeapSourceTest, WhatTheSystemRefusesIsResourceExhausted) {
  EXPECT_THAT(HeapSource().Allocate(uint64_t{1} << 60),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("Cannot allocate memory")));
}

}  // namespace
}  // namespace pinion
