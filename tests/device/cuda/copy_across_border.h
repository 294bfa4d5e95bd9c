// A copy whose host memory spans two registrations; for the fake runtime and for real ones.

#ifndef PINION_TESTS_DEVICE_CUDA_COPY_ACROSS_BORDER_H_
#define PINION_TESTS_DEVICE_CUDA_COPY_ACROSS_BORDER_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/cuda/cuda_registered_source.h"
#include "pinion/device/device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {

// Copies `side_bytes` on either side of the first registration border to the device in one piece,
// and back. `segment` is registered memory of more than a gibibyte.
inline void ExpectCopyAcrossBorder(const CudaApi& api, int index, const HostSegment& segment,
                                   uint64_t side_bytes) {
  char* const begin = static_cast<char*>(segment.data);
  const uint64_t border = BytesToRegistrationBorder(begin, segment.size_bytes);
  ASSERT_LT(border, segment.size_bytes);
  ASSERT_LE(side_bytes, std::min(border, segment.size_bytes - border));
  const uint64_t size_bytes = 2 * side_bytes;
  char* const host = begin + border - side_bytes;
  for (uint64_t i = 0; i < size_bytes; ++i) host[i] = static_cast<char>(i * 31 + i / 509);
  const std::vector<char> bytes(host, host + size_bytes);

  CudaDevice device(api, index);
  PINION_ASSERT_OK_AND_ASSIGN(const StreamHandle stream, device.CreateStream("s"));
  PINION_ASSERT_OK_AND_ASSIGN(void* const there, device.Allocate(size_bytes, stream));
  const CopyPiece in = {there, host, size_bytes};
  const CopyPiece out = {host, there, size_bytes};
  EXPECT_THAT(device.CopyAsync(CopyDirection::kHostToDevice, {&in, 1}, stream), IsOk());
  EXPECT_THAT(device.SynchronizeStream(stream), IsOk());
  std::memset(host, 0, size_bytes);
  EXPECT_THAT(device.CopyAsync(CopyDirection::kDeviceToHost, {&out, 1}, stream), IsOk());
  EXPECT_THAT(device.SynchronizeStream(stream), IsOk());
  EXPECT_EQ(std::memcmp(host, bytes.data(), size_bytes), 0);
  EXPECT_THAT(device.Free(there, stream), IsOk());
  EXPECT_THAT(device.SynchronizeStream(stream), IsOk());
  EXPECT_THAT(device.DestroyStream(stream), IsOk());
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_DEVICE_CUDA_COPY_ACROSS_BORDER_H_
