// A round trip through the engine, for any device that can run simulated compute.

#ifndef PINION_TESTS_DEVICE_CUDA_ENGINE_ROUND_TRIP_H_
#define PINION_TESTS_DEVICE_CUDA_ENGINE_ROUND_TRIP_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/device/device.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/device/device_conformance.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {

// Copies bytes out after the work that writes them, reuses their memory, and copies them back
// before the work that reads them. Uses one piece and several, with host memory from `source`.
inline void ExpectEngineRoundTrip(DeviceUnderTest& under_test,
                                  std::shared_ptr<HostMemorySource> source) {
  constexpr uint64_t kSize = 3 * kMiB;
  constexpr absl::Duration kLong = absl::Seconds(30);
  Device& device = under_test.device();
  AllocatorOptions options;
  options.segment_bytes = 4 * kMiB;
  PINION_ASSERT_OK_AND_ASSIGN(
      const std::shared_ptr<PinnedAllocator> allocator,
      PinnedAllocator::Create(options, std::move(source), FakeHost().Probe()));
  PINION_ASSERT_OK_AND_ASSIGN(
      const std::shared_ptr<TransferEngine> engine,
      TransferEngine::Create({}, std::shared_ptr<Device>(std::shared_ptr<void>(), &device)));
  PINION_ASSERT_OK_AND_ASSIGN(const StreamHandle compute, device.CreateStream("compute"));
  PINION_ASSERT_OK_AND_ASSIGN(void* const data, device.Allocate(kSize, compute));
  char* const bytes = static_cast<char*>(data);

  for (const uint64_t pieces : {1, 16}) {
    SCOPED_TRACE(pieces);
    const uint64_t piece_bytes = kSize / pieces;
    PINION_ASSERT_OK_AND_ASSIGN(PinnedBlock block, allocator->Allocate(kSize));
    PINION_ASSERT_OK_AND_ASSIGN(PinnedBlock check_block, allocator->Allocate(kSize));
    const auto host = std::make_shared<HostBuffer>(std::move(block));
    const auto check = std::make_shared<HostBuffer>(std::move(check_block));
    CopyBatch out(CopyDirection::kDeviceToHost);
    CopyBatch in(CopyDirection::kHostToDevice);
    CopyBatch read(CopyDirection::kDeviceToHost);
    // The order is reversed so that neighbouring pieces are not merged.
    for (uint64_t i = 0; i < pieces; ++i) {
      const uint64_t there = (pieces - 1 - i) * piece_bytes;
      ASSERT_THAT(
          under_test.Fill(bytes + there, static_cast<uint8_t>(10 + i), piece_bytes, compute),
          IsOk());
      out.Add(host, i * piece_bytes, bytes + there, piece_bytes);
      in.Add(host, i * piece_bytes, bytes + there, piece_bytes);
    }
    read.Add(check, 0, data, kSize);

    PINION_ASSERT_OK_AND_ASSIGN(const Transfer left, engine->Submit(std::move(out), compute));
    ASSERT_THAT(left.WaitOn(compute, kReuseAfterCopyOut), IsOk());
    ASSERT_THAT(under_test.Fill(data, 99, kSize, compute), IsOk());
    PINION_ASSERT_OK_AND_ASSIGN(const Transfer back, engine->Submit(std::move(in), compute));
    ASSERT_THAT(back.WaitOn(compute, kReadAfterCopyIn), IsOk());
    PINION_ASSERT_OK_AND_ASSIGN(const Transfer seen, engine->Submit(std::move(read), compute));
    ASSERT_THAT(seen.Wait(kLong), IsOk());
    const uint8_t* const arrived = static_cast<const uint8_t*>(check->data());
    for (uint64_t i = 0; i < pieces; ++i) {
      const uint8_t* const piece = arrived + (pieces - 1 - i) * piece_bytes;
      EXPECT_EQ(int{piece[0]}, int(10 + i));
      EXPECT_EQ(std::memcmp(piece, piece + 1, piece_bytes - 1), 0) << "piece " << i;
    }
  }
  EXPECT_THAT(engine->Drain(kLong), IsOk());
  EXPECT_THAT(device.Free(data, compute), IsOk());
  EXPECT_THAT(device.SynchronizeStream(compute), IsOk());
  EXPECT_THAT(device.DestroyStream(compute), IsOk());
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_DEVICE_CUDA_ENGINE_ROUND_TRIP_H_
