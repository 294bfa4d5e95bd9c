// Loads libpinion_torch.so as a program without knowledge of Pinion does.

#include <dlfcn.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/shared/c_api.h"
#include "pinion/tests/support/python_with_torch.h"
#include "pinion/tests/support/run_program.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::UnorderedElementsAre;

constexpr char kLibrary[] = "shared/libpinion_torch.so";
constexpr char kEmuLibrary[] = "tests/shared/libpinion_torch_emu.so";

struct Library {
  explicit Library(const char* path) : handle(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    EXPECT_NE(handle, nullptr) << dlerror();
    Find("pinion_install_torch_host_allocator", install);
    Find("pinion_torch_host_memory_stats", stats);
    Find("pinion_last_error", last_error);
  }
  template <typename Function>
  void Find(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(handle, name));
    EXPECT_NE(function, nullptr) << name;
  }

  void* const handle;
  decltype(pinion_install_torch_host_allocator)* install;
  decltype(pinion_torch_host_memory_stats)* stats;
  decltype(pinion_last_error)* last_error;
};

TEST(LibpinionTorch, ExportsItsCFunctionsAlone) {
  const ProgramOutcome symbols = RunProgram(std::string("nm -D --defined-only ") + kLibrary);
  ASSERT_EQ(symbols.exit_code, 0) << symbols.err;
  std::vector<std::string> strong;
  std::vector<std::string> weak;
  std::istringstream lines(symbols.out);
  for (std::string address, type, name; lines >> address >> type >> name;) {
    (type == "W" ? weak : strong).push_back(name);
  }
  EXPECT_THAT(strong, UnorderedElementsAre("pinion_install_torch_host_allocator",
                                           "pinion_torch_host_memory_stats", "pinion_last_error"));
  // libstdc++ exports these std::string members too, so the linker keeps them visible.
  EXPECT_THAT(weak, Each(MatchesRegex("_ZNK?St7__cxx1112basic_string.*")));
}

TEST(LibpinionTorch, SaysWhatIsMissingWhereThereIsNoGpu) {
  if (CudaDeviceCount().ok()) GTEST_SKIP() << "there is a GPU";
  const Library pinion(kLibrary);
  EXPECT_EQ(pinion.install("cuda", 0, 0, 0), -1);
  EXPECT_THAT(pinion.last_error(), HasSubstr("no CUDA device: install an NVIDIA driver"));
  EXPECT_EQ(pinion.stats("cuda"), nullptr);
  EXPECT_THAT(pinion.last_error(), AllOf(HasSubstr("not installed for cuda"),
                                         HasSubstr("pinion_install_torch_host_allocator")));
}

TEST(LibpinionTorch, RefusesWhatItDoesNotKnow) {
  const Library pinion(kLibrary);
  EXPECT_EQ(pinion.install("emu", 0, 0, 0), -1);
  EXPECT_THAT(pinion.last_error(), HasSubstr("it has \"cuda\""));
  EXPECT_EQ(pinion.install(nullptr, 0, 0, 0), -1);
  EXPECT_EQ(pinion.stats(nullptr), nullptr);
}

TEST(LibpinionTorch, NamesTheArgumentThatItRefuses) {
  const Library pinion(kEmuLibrary);
  for (const double percent : {101.0, -1.0}) {
    EXPECT_EQ(pinion.install("emu", 0, percent, 0), -1);
    EXPECT_THAT(pinion.last_error(), HasSubstr("high_percent"));
  }
  EXPECT_EQ(pinion.install("emu", 0, 100, 4097), -1);
  EXPECT_THAT(pinion.last_error(), HasSubstr("segment_bytes"));
}

TEST(LibpinionTorch, InstallsForADeviceThatIsThere) {
  const Library pinion(kEmuLibrary);
  ASSERT_EQ(pinion.install("emu", 64 << 20, 2, 2 << 20), 0) << pinion.last_error();
  EXPECT_STREQ(pinion.last_error(), "");
  const char* const stats = pinion.stats("emu");
  ASSERT_NE(stats, nullptr) << pinion.last_error();
  EXPECT_THAT(stats, HasSubstr("\"active_bytes.current\":0"));
  EXPECT_EQ(pinion.install("emu", 64 << 20, 100, 0), -1);
  EXPECT_THAT(pinion.last_error(), HasSubstr("already"));
}

TEST(LibpinionTorch, PythonWithoutAGpuIsToldSoAndGoesOn) {
  const std::string python = PythonWithTorch();
  if (python.empty()) GTEST_SKIP() << kNoPythonWithTorch;
  if (CudaDeviceCount().ok()) GTEST_SKIP() << "there is a GPU";
  const ProgramOutcome outcome = RunProgram(python + " tests/shared/without_gpu.py " + kLibrary);
  EXPECT_EQ(outcome.out, "passed\n") << outcome.err;
  EXPECT_EQ(outcome.exit_code, 0);
}

TEST(LibpinionTorch, PythonsPinnedTensorsComeFromPinion) {
  const std::string python = PythonWithTorch();
  if (python.empty()) GTEST_SKIP() << kNoPythonWithTorch;
  const ProgramOutcome outcome =
      RunProgram(python + " tests/shared/pinned_tensors.py " + kEmuLibrary + " emu");
  EXPECT_EQ(outcome.out, "passed\n") << outcome.err;
  EXPECT_EQ(outcome.exit_code, 0);
}

TEST(LibpinionTorch, PythonsPinnedTensorsComeFromPinionOnAGpu) {
  const std::string python = PythonWithTorch();
  if (python.empty()) GTEST_SKIP() << kNoPythonWithTorch;
  if (!CudaDeviceCount().ok()) GTEST_SKIP() << "there is no GPU";
  const ProgramOutcome outcome =
      RunProgram(python + " tests/shared/pinned_tensors.py " + kLibrary + " cuda");
  EXPECT_EQ(outcome.out, "passed\n") << outcome.err;
  EXPECT_EQ(outcome.exit_code, 0);
}

}  // namespace
}  // namespace pinion::testing
