// A CUDA device on the fake runtime, with helpers for its tests.

#ifndef PINION_TESTS_DEVICE_CUDA_CUDA_DEVICE_FIXTURE_H_
#define PINION_TESTS_DEVICE_CUDA_CUDA_DEVICE_FIXTURE_H_

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/cuda/fake_cuda.h"

namespace pinion::testing {

// The device is cuda:1 of two; the thread has not selected a device.
class CudaDeviceFixture : public ::testing::Test {
 protected:
  CudaDeviceFixture() : fake_(TwoDevices()), device_(FakeCuda::Api(), 1) {}

  static EmulatedOptions TwoDevices() {
    EmulatedOptions options;
    options.device_count = 2;
    options.memory_bytes = 64 * kMiB;
    return options;
  }
  static int CurrentDevice() {
    int device = -1;
    EXPECT_EQ(FakeCuda::Api().GetDevice(&device), cudaSuccess);
    return device;
  }
  // Returns the latched error, which the program's next unrelated call would report.
  static cudaError_t LatchedError() { return FakeCuda::Api().GetLastError(); }

  // Returns an event behind hours of work on `stream`.
  EventHandle EventBehindLongWork(StreamHandle stream) {
    const Kernel kernel = {.name = "long", .reads = {}, .writes = {}, .flops = 1e19};
    EXPECT_TRUE(fake_.machine().Launch(1, stream, kernel).ok());
    const EventHandle event = device_.CreateEvent().value();
    EXPECT_TRUE(device_.RecordEvent(event, stream).ok());
    return event;
  }

  FakeCuda fake_;
  CudaDevice device_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_DEVICE_CUDA_CUDA_DEVICE_FIXTURE_H_
