// Checks what is read of LibTorch's allocators, the upper bound of memory that nobody reported, and
// which tensors are plain. Bytes of bounds are small numbers here.

#include "pinion/hooks/autograd/torch_bridge.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include "gtest/gtest.h"
#include "pinion/tests/hooks/support/emu_fixture.h"

namespace pinion::testing {
namespace {

TEST(AllocatorBytesOf, CountsWhatIsThereAndWhatWasFreed) {
  EmuWorld world;
  const AllocatorBytes begin = AllocatorBytesOf(world.device());
  const auto make = [&] {
    return at::empty({1024}, at::TensorOptions(world.device()).dtype(at::kByte));
  };
  const at::Tensor kept = make();
  make();
  const AllocatorBytes end = AllocatorBytesOf(world.device());
  EXPECT_EQ(end.current - begin.current, 1024);
  EXPECT_EQ(end.allocated - begin.allocated, 2 * 1024);
  EXPECT_EQ(end.peak, end.current + 1024);
  ASSERT_TRUE(end.frees.has_value());
  EXPECT_EQ(*end.frees - begin.frees.value_or(0), 1);
}

// Since LibTorch 2.13 they are TensorImpls with a storage, as plain tensors are.
TEST(IsPlainTensor, AFakeTensorOfCppIsNot) {
  const at::Tensor tensor = at::empty({4});
  EXPECT_TRUE(IsPlainTensor(tensor));
  const at::Tensor fake = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.storage()), tensor.key_set().add(c10::DispatchKey::Fake), tensor.dtype());
  EXPECT_FALSE(IsPlainTensor(fake));
}

constexpr AllocatorBytes kBegin = {.current = 10, .peak = 50, .allocated = 100};

TEST(MostBytesBetween, WhatIsReportedInFullIsItsPeak) {
  const AllocatorBytes end = {.current = 10, .peak = 50, .allocated = 120};
  EXPECT_EQ(MostBytesBetween(kBegin, end, {.peak_bytes = 30, .added_bytes = 20}), 30);
}

TEST(MostBytesBetween, UnreportedAllocationsCountAsNeverFreed) {
  const AllocatorBytes end = {.current = 10, .peak = 50, .allocated = 120};
  EXPECT_EQ(MostBytesBetween(kBegin, end, {.peak_bytes = 20, .added_bytes = 5}), 35);
}

TEST(MostBytesBetween, TheAllocatorsPeakBoundsThem) {
  const AllocatorBytes end = {.current = 10, .peak = 50, .allocated = 900};
  EXPECT_EQ(MostBytesBetween(kBegin, end, {.peak_bytes = 20}), 50);
}

TEST(MostBytesBetween, AfterTheProgramHasResetThePeakItBoundsNothing) {
  const AllocatorBytes end = {.current = 10, .peak = 15, .allocated = 180};
  EXPECT_EQ(MostBytesBetween(kBegin, end, {.peak_bytes = 20}), 100);
}

// As cudaMallocAsync's allocator, which has no total.
TEST(MostBytesBetween, ANewPeakCountsWhereAllocationsAreNotCounted) {
  const AllocatorBytes begin = {.current = 10, .peak = 50};
  const AllocatorBytes end = {.current = 10, .peak = 70};
  EXPECT_EQ(MostBytesBetween(begin, end, {.peak_bytes = 20, .added_bytes = 5}), 70);
}

// Of 10 bytes, 4 are streamed weights.
constexpr AllocatorBytes kBeginBesideWeights = {
    .current = 10, .peak = 50, .allocated = 100, .streamed = 4, .streamed_allocated = 20};

TEST(MostBytesBesideStreamed, WeightsThatWereThereAllTheTimeAreNoneOfThePeak) {
  AllocatorBytes end = kBeginBesideWeights;
  end.peak = 70;
  end.allocated = 600;
  EXPECT_EQ(MostBytesBesideStreamed(kBeginBesideWeights, end, {.peak_bytes = 6}), 66);
}

TEST(MostBytesBesideStreamed, WeightsThatWereFetchedMayHaveComeAfterThePeak) {
  AllocatorBytes end = kBeginBesideWeights;
  end.current = 40;
  end.peak = 70;
  end.streamed += 30;
  end.streamed_allocated += 30;
  end.allocated = 100 + 30 + 300;
  EXPECT_EQ(MostBytesBesideStreamed(kBeginBesideWeights, end, {.peak_bytes = 6}), 66);
}

TEST(MostBytesBesideStreamed, WeightsThatWereFetchedAreNoneOfTheUnreportedBytes) {
  AllocatorBytes end = kBeginBesideWeights;
  end.peak = 70;
  end.streamed += 30;
  end.streamed_allocated += 30;
  end.allocated = 100 + 30 + 9;
  EXPECT_EQ(MostBytesBesideStreamed(kBeginBesideWeights, end, {.peak_bytes = 6}), 15);
  end.peak = 50;
  EXPECT_EQ(MostBytesBesideStreamed(kBeginBesideWeights, end, {.peak_bytes = 6}), 15);
}

TEST(MostBytesBesideStreamed, ThoseOfThemThatWereReportedAreNoneEither) {
  AllocatorBytes end = kBeginBesideWeights;
  end.streamed += 30;
  end.streamed_allocated += 30;
  end.allocated = 100 + 30 + 9;
  const Reported reported = {.peak_bytes = 6, .added_bytes = 30};
  EXPECT_EQ(MostBytesBesideStreamed(kBeginBesideWeights, end, reported), 15);
}

}  // namespace
}  // namespace pinion::testing
