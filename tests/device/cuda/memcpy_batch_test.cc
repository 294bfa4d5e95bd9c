#include "pinion/device/cuda/memcpy_batch.h"

#include <cstddef>
#include <cstdint>

#include "gtest/gtest.h"

namespace pinion {
namespace {

struct Seen {
  void* dst = nullptr;
  const void* src = nullptr;
  size_t size = 0;
  size_t count = 0;
  cudaMemcpySrcAccessOrder order = cudaMemcpySrcAccessOrderInvalid;
  unsigned int flags = 0;
  size_t first_piece = 99;
  size_t attribute_count = 0;
  cudaStream_t stream = nullptr;
} seen;

cudaError_t MemcpyBatch13(void* const* dsts, const void* const* srcs, const size_t* sizes,
                          size_t count, cudaMemcpyAttributes* attributes, size_t* first_pieces,
                          size_t attribute_count, cudaStream_t stream) {
  seen = {.dst = dsts[1],
          .src = srcs[1],
          .size = sizes[1],
          .count = count,
          .order = attributes[0].srcAccessOrder,
          .flags = attributes[0].flags,
          .first_piece = first_pieces[0],
          .attribute_count = attribute_count,
          .stream = stream};
  return cudaErrorInvalidValue;
}

cudaError_t MemcpyBatch12(void** dsts, void** srcs, size_t* sizes, size_t count,
                          cudaMemcpyAttributes* attributes, size_t* first_pieces,
                          size_t attribute_count, size_t* failed_piece, cudaStream_t stream) {
  *failed_piece = 1;
  return MemcpyBatch13(dsts, srcs, sizes, count, attributes, first_pieces, attribute_count, stream);
}

template <typename MemcpyBatch>
void ExpectTheCallGetsThrough(MemcpyBatch memcpy_batch) {
  char bytes[4] = {};
  void* const dsts[] = {&bytes[0], &bytes[1]};
  const void* const srcs[] = {&bytes[2], &bytes[3]};
  const size_t sizes[] = {1, 2};
  const auto stream = reinterpret_cast<cudaStream_t>(uintptr_t{0x30});
  seen = Seen();
  EXPECT_EQ(MemcpyBatchInStreamOrder(memcpy_batch, dsts, srcs, sizes, 2, stream),
            cudaErrorInvalidValue);
  EXPECT_EQ(seen.dst, &bytes[1]);
  EXPECT_EQ(seen.src, &bytes[3]);
  EXPECT_EQ(seen.size, 2u);
  EXPECT_EQ(seen.count, 2u);
  EXPECT_EQ(seen.order, cudaMemcpySrcAccessOrderStream);
  EXPECT_EQ(seen.flags, unsigned{cudaMemcpyFlagPreferOverlapWithCompute});
  EXPECT_EQ(seen.first_piece, 0u);
  EXPECT_EQ(seen.attribute_count, 1u);
  EXPECT_EQ(seen.stream, stream);
}

// CUDA 13 removed a parameter and added const (llm-d#607).
TEST(MemcpyBatchTest, TheSignatureOfCuda13IsCalled) { ExpectTheCallGetsThrough(&MemcpyBatch13); }

TEST(MemcpyBatchTest, TheSignatureOfCuda12IsCalled) { ExpectTheCallGetsThrough(&MemcpyBatch12); }

}  // namespace
}  // namespace pinion
