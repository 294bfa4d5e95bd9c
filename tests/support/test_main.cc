// Runs the tests of the file that the program is named after: in builds with `//config:one_file` a
// folder's tests are one library, which each of its programs links (tools/pinion.bzl).

#include <cstdio>
#include <string>
#include <string_view>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

// What follows the last slash.
std::string_view FileName(std::string_view path) { return path.substr(path.rfind('/') + 1); }

// Adds to what --gtest_filter leaves out the tests of other files. Returns whether a test is left.
bool KeepTestsOf(std::string_view source) {
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  std::string others;
  bool any = false;
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      if (FileName(test.file()) == source) {
        any = true;
      } else {
        others += std::string(others.empty() ? "" : ":") + suite.name() + "." + test.name();
      }
    }
  }
  std::string& filter = testing::GTEST_FLAG(filter);
  if (!others.empty()) filter += (filter.find('-') == std::string::npos ? "-" : ":") + others;
  return any;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string source = std::string(FileName(argv[0])) + ".cc";
  testing::InitGoogleMock(&argc, argv);
  if (!KeepTestsOf(source)) {
    std::fprintf(stderr, "%s: there is no test of a file %s\n", argv[0], source.c_str());
    return 1;
  }
  return RUN_ALL_TESTS();
}
