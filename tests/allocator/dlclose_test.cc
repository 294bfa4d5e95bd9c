// Loads, uses and unloads a library that contains Pinion. Afterwards no mapping, handler or
// callback of the library may remain. AddressSanitizer reports leaks at the end of the test.

#include <cstdint>
#include <fstream>

#include "gtest/gtest.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/loaded_library.h"

namespace pinion {
namespace {

using ::pinion::testing::ChildProcess;
using ::pinion::testing::LoadedLibrary;

constexpr char kLibrary[] = "tests/allocator/libdlclose_plugin.so";

TEST(DlcloseTest, ALibraryThatHasUsedTheAllocatorCanBeUnloadedAndLoadedAgain) {
  for (int round = 0; round < 5; ++round) {
    LoadedLibrary library(kLibrary);
    EXPECT_EQ(library.Call("UseTheAllocator"), 0);
    EXPECT_EQ(library.Call("UseTheAllocatorOnAnotherThread"), 0);
    library.Close();
    EXPECT_FALSE(LoadedLibrary::IsLoaded(kLibrary)) << "something keeps it";
  }
}

uint64_t PagesMapped() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages;
}

TEST(DlcloseTest, GlobalsOfALibraryGoWithIt) {
  uint64_t after_first = 0;
  for (int round = 0; round < 3; ++round) {
    LoadedLibrary library(kLibrary);
    EXPECT_EQ(library.Call("UseGlobals"), 0);
    library.Close();
    EXPECT_FALSE(LoadedLibrary::IsLoaded(kLibrary)) << "something keeps it";
    if (round == 0) after_first = PagesMapped();
  }
  // The margin is half a segment of the default size: one leaked segment fails the test.
  EXPECT_LT(PagesMapped(), after_first + (uint64_t{32} << 20) / 4096);
}

// A fork handler that stayed registered would call unmapped code.
TEST(DlcloseTest, AProcessForksAfterTheLibraryHasGone) {
  {
    LoadedLibrary library(kLibrary);
    EXPECT_EQ(library.Call("UseTheAllocator"), 0);
  }
  ASSERT_FALSE(LoadedLibrary::IsLoaded(kLibrary));
  ChildProcess child([] {});
  EXPECT_EQ(child.Wait(), 0);
}

TEST(DlcloseTest, AChildOfForkUsesALibraryThatItsParentHasUsed) {
  LoadedLibrary library(kLibrary);
  EXPECT_EQ(library.Call("UseTheAllocator"), 0);
  ChildProcess child([&] {
    EXPECT_EQ(library.Call("UseTheAllocator"), 0);
    library.Close();
  });
  EXPECT_EQ(child.Wait(), 0);
}

}  // namespace
}  // namespace pinion
