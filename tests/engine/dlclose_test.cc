// Loads, uses and unloads a library that contains Pinion's engine. AddressSanitizer reports leaks
// at the end of the test.

#include "gtest/gtest.h"
#include "pinion/tests/support/loaded_library.h"

namespace pinion::testing {
namespace {

TEST(DlcloseTest, ALibraryThatHasUsedTheEngineCanBeUnloadedAndLoadedAgain) {
  constexpr char kLibrary[] = "tests/engine/libdlclose_plugin.so";
  for (int round = 0; round < 5; ++round) {
    LoadedLibrary library(kLibrary);
    EXPECT_EQ(library.Call("UseTheEngine"), 0);
    library.Close();
    EXPECT_FALSE(LoadedLibrary::IsLoaded(kLibrary)) << "something keeps it";
  }
}

}  // namespace
}  // namespace pinion::testing
