// Calls cudaMemcpyBatchAsync with either of its two signatures.

#ifndef PINION_DEVICE_CUDA_MEMCPY_BATCH_H_
#define PINION_DEVICE_CUDA_MEMCPY_BATCH_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

namespace pinion {

// Calls `memcpy_batch` with CUDA 13's arguments, or with those of 12.8 and 12.9 (one more, and no
// const). Sources are read in stream order, because the stream's preceding work may have just
// written them. The hint asks for copy engines: small pieces copied by a kernel would queue behind
// the compute (cudf#23674).
template <typename MemcpyBatch>
cudaError_t MemcpyBatchInStreamOrder(MemcpyBatch memcpy_batch, void* const* dsts,
                                     const void* const* srcs, const size_t* sizes, size_t count,
                                     cudaStream_t stream,
                                     unsigned int hint = cudaMemcpyFlagPreferOverlapWithCompute) {
  cudaMemcpyAttributes in_stream_order = {};
  in_stream_order.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  in_stream_order.flags = hint;
  size_t first_piece = 0;
  if constexpr (std::is_invocable_v<MemcpyBatch, void* const*, const void* const*, const size_t*,
                                    size_t, cudaMemcpyAttributes*, size_t*, size_t, cudaStream_t>) {
    return memcpy_batch(dsts, srcs, sizes, count, &in_stream_order, &first_piece, 1, stream);
  } else {
    size_t failed_piece = 0;
    return memcpy_batch(const_cast<void**>(dsts), const_cast<void**>(srcs),
                        const_cast<size_t*>(sizes), count, &in_stream_order, &first_piece, 1,
                        &failed_piece, stream);
  }
}

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_MEMCPY_BATCH_H_
