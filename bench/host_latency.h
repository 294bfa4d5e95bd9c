// Measures the GPU's latency of reading pinned host memory: nvbandwidth's host_device_latency_sm.
// One thread follows pointers through a buffer of 2 MiB.
//
// The driver compiles the kernel from PTX text, so that Pinion needs no nvcc. The kernel assembles
// for sm_80, sm_90 and sm_100.

#ifndef PINION_BENCH_HOST_LATENCY_H_
#define PINION_BENCH_HOST_LATENCY_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "pinion/device/cuda/cuda_api.h"

namespace pinion {

// Returns nanoseconds per read: the mean of `reads` dependent reads by the device's clock. A
// million reads take a second. FailedPrecondition if the driver cannot run the kernel; Internal if
// the chase ended at a wrong word; and the device's errors.
absl::StatusOr<double> MeasureHostLatencyNs(const CudaApi& api, int index,
                                            uint64_t reads = 1'000'000);

// The kernel's text, for tests.
extern const char kHostLatencyPtx[];

}  // namespace pinion

#endif  // PINION_BENCH_HOST_LATENCY_H_
