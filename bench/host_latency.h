// How long the GPU takes to read a word of pinned host memory: nvbandwidth's
// host_device_latency_sm. One thread follows pointers through a buffer of 2 MiB, each read after
// the one before.
//
// The kernel is PTX text, which the driver compiles: building Pinion takes no nvcc. It assembles
// for sm_80, sm_90 and sm_100.

#ifndef PINION_BENCH_HOST_LATENCY_H_
#define PINION_BENCH_HOST_LATENCY_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "pinion/device/cuda/cuda_api.h"

namespace pinion {

// Nanoseconds per read, the mean of `reads` dependent ones, by the device's own clock. Takes about
// a second per million. FailedPrecondition where the driver cannot run the kernel; Internal, among
// the device's other errors, if the chase ended at another word than it should have.
absl::StatusOr<double> MeasureHostLatencyNs(const CudaApi& api, int index,
                                            uint64_t reads = 1'000'000);

// The kernel's text, for tests.
extern const char kHostLatencyPtx[];

}  // namespace pinion

#endif  // PINION_BENCH_HOST_LATENCY_H_
