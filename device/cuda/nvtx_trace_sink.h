// Shows Pinion's host ranges in Nsight Systems, as NVTX ranges of the domain "pinion".
//
//   options.engine.trace = std::make_shared<NvtxTraceSink>();
//   $ nsys profile --trace=cuda,nvtx ./train        (--nvtx-domain-include=pinion for these alone)
//
// The NVTX payload of a range is its size in bytes. Transfers are left out: Nsight Systems records
// every copy on its stream. Without an attached tool an NVTX call does nothing.
//
// Thread safety: thread-safe.

#ifndef PINION_DEVICE_CUDA_NVTX_TRACE_SINK_H_
#define PINION_DEVICE_CUDA_NVTX_TRACE_SINK_H_

#include <cstdint>

#include "pinion/device/trace/trace_sink.h"

namespace pinion {

class NvtxTraceSink final : public TraceSink {
 public:
  void BeginRange(const char* name, uint64_t size_bytes) override;
  void EndRange() override;
  bool WantsTransfers() const override { return false; }
};

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_NVTX_TRACE_SINK_H_
