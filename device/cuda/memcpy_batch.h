// cudaMemcpyBatchAsync behind one signature, whichever of its two the runtime has.

#ifndef PINION_DEVICE_CUDA_MEMCPY_BATCH_H_
#define PINION_DEVICE_CUDA_MEMCPY_BATCH_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

namespace pinion {

// Calls `memcpy_batch` with the arguments that it takes: CUDA 13's, or those of 12.8 and 12.9,
// which have one more and lack the const. Each source is read in the order of the stream, not "any
// order": what a copy out reads may have been written a moment ago by the work that the stream has
// just waited for. The hint asks for copy engines: a driver that copies small pieces by a kernel
// lets them queue behind the compute that they are to run beside (cudf#23674).
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
