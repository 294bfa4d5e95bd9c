// A library that has Pinion's engine inside is loaded, used and unloaded. (Leaks are
// AddressSanitizer's to find, as the test ends.)

#include "gtest/gtest.h"
#include "pinion/tests/support/loaded_library.h"

namespace pinion {
namespace {

using ::pinion::testing::LoadedLibrary;

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
}  // namespace pinion
