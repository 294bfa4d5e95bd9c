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
  int active = 0;
  std::vector<std::string> calls;
} driver;

CUcontext ContextOf(CUdevice device) { return reinterpret_cast<CUcontext>(intptr_t{100 + device}); }

CUresult Init(unsigned int flags) { return flags == 0 ? driver.init : CUDA_ERROR_INVALID_VALUE; }

CUresult GetState(CUdevice, unsigned int* flags, int* active) {
  *flags = 0;
  *active = driver.active;
  return driver.next;
}

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
                   {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(&GetState)},
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

TEST_F(DriverContextsTest, ADeviceHasAContextOnceItIsActive) {
  DriverContexts contexts(&Lookup);
  for (const bool active : {true, false}) {
    driver.active = active;
    bool has_context = !active;
    EXPECT_EQ(contexts.HasContext(0, &has_context), cudaSuccess);
    EXPECT_EQ(has_context, active);
  }
  driver.active = 1;
  driver.next = CUDA_ERROR_INVALID_DEVICE;
  bool has_context = false;
  EXPECT_EQ(contexts.HasContext(9, &has_context), cudaErrorInvalidDevice);
  EXPECT_FALSE(has_context);
}

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

TEST_F(DriverContextsTest, MoreThan64DevicesAreLeftToTheRuntime) {
  DriverContexts contexts(&Lookup);
  EXPECT_EQ(contexts.PushContext(63), cudaSuccess);
  EXPECT_EQ(contexts.PushContext(64), cudaErrorNotSupported);
}

TEST_F(DriverContextsTest, ADriverThatLacksAFunctionOrDoesNotStartIsNotUsed) {
  const auto expect_unused = [] {
    DriverContexts contexts(&Lookup);
    bool has_context = false;
    driver.active = 1;
    EXPECT_EQ(contexts.HasContext(0, &has_context), cudaErrorNotSupported);
    EXPECT_EQ(contexts.PushContext(0), cudaErrorNotSupported);
    EXPECT_FALSE(has_context);
    EXPECT_THAT(driver.calls, IsEmpty());
  };
  for (const char* function : {"cuInit", "cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain",
                               "cuCtxPushCurrent", "cuCtxPopCurrent"}) {
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
  bool has_context = false;
  EXPECT_EQ(RealCudaApi().HasContext(0, &has_context), cudaErrorNotSupported);
  EXPECT_EQ(RealCudaApi().PushContext(0), cudaErrorNotSupported);
}

}  // namespace
}  // namespace pinion
