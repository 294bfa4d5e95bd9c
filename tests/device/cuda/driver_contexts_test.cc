#include <climits>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/device/cuda/cuda_calls.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A driver that obeys and records its calls.
struct Driver {
  std::string missing;  // name of a function
  CUresult init = CUDA_SUCCESS;
  CUresult next = CUDA_SUCCESS;  // result of the other functions
  std::vector<std::string> calls;
} driver;

CUcontext ContextOf(CUdevice device) { return reinterpret_cast<CUcontext>(intptr_t{100 + device}); }

CUresult Init(unsigned int flags) { return flags == 0 ? driver.init : CUDA_ERROR_INVALID_VALUE; }

CUresult Retain(CUcontext* context, CUdevice device) {
  driver.calls.push_back("retain " + std::to_string(device));
  if (driver.next == CUDA_SUCCESS) *context = ContextOf(device);
  return driver.next;
}

CUresult Push(CUcontext context) {
  driver.calls.push_back("push " + std::to_string(reinterpret_cast<intptr_t>(context) - 100));
  return driver.next;
}

CUresult Pop(CUcontext*) {
  driver.calls.push_back("pop");
  return driver.next;
}

void* Lookup(const char* name) {
  if (name == driver.missing) return nullptr;
  const struct {
    const char* name;
    void* function;
  } functions[] = {{"cuInit", reinterpret_cast<void*>(&Init)},
                   {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&Retain)},
                   {"cuCtxPushCurrent", reinterpret_cast<void*>(&Push)},
                   {"cuCtxPopCurrent", reinterpret_cast<void*>(&Pop)}};
  for (const auto& [known, function] : functions) {
    if (std::strcmp(name, known) == 0) return function;
  }
  ADD_FAILURE() << name;
  return nullptr;
}

class DriverContextsTest : public ::testing::Test {
 protected:
  DriverContextsTest() { driver = {}; }
};

TEST_F(DriverContextsTest, AContextIsRetainedAtItsFirstPushAndPushedEachTime) {
  DriverContexts contexts(&Lookup);
  for (const int device : {1, 1, 0}) EXPECT_EQ(contexts.PushContext(device), cudaSuccess);
  EXPECT_EQ(contexts.PopContext(), cudaSuccess);
  EXPECT_THAT(driver.calls,
              ElementsAre("retain 1", "push 1", "push 1", "retain 0", "push 0", "pop"));
}

TEST_F(DriverContextsTest, ErrorsAreTheRuntimesAndARefusedRetainIsTriedAgain) {
  DriverContexts contexts(&Lookup);
  driver.next = CUDA_ERROR_OUT_OF_MEMORY;
  EXPECT_EQ(contexts.PushContext(1), cudaErrorMemoryAllocation);
  EXPECT_EQ(contexts.PopContext(), cudaErrorMemoryAllocation);
  driver.next = CUDA_SUCCESS;
  EXPECT_EQ(contexts.PushContext(1), cudaSuccess);
  driver.next = CUDA_ERROR_INVALID_CONTEXT;
  EXPECT_EQ(contexts.PushContext(1), cudaErrorDeviceUninitialized);
  EXPECT_THAT(driver.calls, ElementsAre("retain 1", "pop", "retain 1", "push 1", "push 1"));
}

TEST_F(DriverContextsTest, MoreThan64DevicesAndNegativeOnesAreLeftToTheRuntime) {
  DriverContexts contexts(&Lookup);
  EXPECT_EQ(contexts.PushContext(63), cudaSuccess);
  for (const int device : {64, -1, INT_MIN}) {
    EXPECT_EQ(contexts.PushContext(device), cudaErrorNotSupported) << device;
  }
}

TEST_F(DriverContextsTest, ADriverThatLacksAFunctionOrDoesNotStartIsNotUsed) {
  const auto expect_unused = [] {
    DriverContexts contexts(&Lookup);
    EXPECT_EQ(contexts.PushContext(0), cudaErrorNotSupported);
    EXPECT_THAT(driver.calls, IsEmpty());
  };
  for (const char* function :
       {"cuInit", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuCtxPopCurrent"}) {
    SCOPED_TRACE(function);
    driver.missing = function;
    expect_unused();
  }
  driver.missing = "";
  driver.init = CUDA_ERROR_NO_DEVICE;
  expect_unused();
}

TEST(RealCudaApiTest, WithoutADriverThereAreNoContexts) {
  if (CudaDeviceCount().ok()) GTEST_SKIP() << "there is a driver";
  EXPECT_EQ(RealCudaApi().PushContext(0), cudaErrorNotSupported);
}

}  // namespace
}  // namespace pinion
