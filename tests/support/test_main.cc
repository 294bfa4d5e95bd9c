// Runs only the tests of the file that the program is named after. With `//config:one_file`, all
// tests of a folder are one library, which each of the folder's programs links (tools/pinion.bzl).

#include <cstdio>
#include <map>
#include <string>
#include <string_view>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

std::string_view FileName(std::string_view path) { return path.substr(path.rfind('/') + 1); }

// Excludes the tests of other files in --gtest_filter. Returns an error message if a test belongs
// to no program or to two.
std::string KeepTestsOf(const std::string& source) {
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  std::string others;
  std::map<std::string, std::string_view> file_of_test;
  bool any = false;
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      const std::string name = std::string(suite.name()) + "." + test.name();
      const std::string_view file = FileName(test.file());
      if (!file.ends_with("_test.cc")) {
        return name + " is a test of " + test.file() + ", whose users must be alone";
      }
      if (const auto& [known, is_new] = file_of_test.emplace(name, file);
          !is_new && known->second != file) {
        return "two files have a test " + name;
      }
      if (file == source) {
        any = true;
      } else {
        others += (others.empty() ? "" : ":") + name;
      }
    }
  }
  std::string& filter = testing::GTEST_FLAG(filter);
  if (!others.empty()) filter += (filter.find('-') == std::string::npos ? "-" : ":") + others;
  return any ? "" : "there is no test of a file " + source;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string source = std::string(FileName(argv[0])) + ".cc";
  testing::InitGoogleMock(&argc, argv);
  if (const std::string wrong = KeepTestsOf(source); !wrong.empty()) {
    std::fprintf(stderr, "%s: %s\n", argv[0], wrong.c_str());
    return 1;
  }
  return RUN_ALL_TESTS();
}
