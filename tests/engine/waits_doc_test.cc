// docs/waits.md lists every wait site, and every test that it names exists.

#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/stream/wait_site.h"

namespace pinion {
namespace {

std::string TextOf(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

// The rows of the table by their site.
std::map<std::string, std::string> Rows(const std::string& document) {
  std::map<std::string, std::string> rows;
  std::istringstream lines(document);
  const std::regex row("^\\| `(k[A-Za-z]+)` \\|.*");
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (std::regex_match(line, match, row)) rows[match[1]] = line;
  }
  return rows;
}

TEST(WaitsDocTest, EverySiteHasARowWithTestsThatExist) {
  std::string tests;
  for (const char* name :
       {"engine/wait_site_mutation_test.cc", "engine/window_test.cc",
        "engine/transfer_engine_test.cc", "hooks/activations/wait_sites_test.cc"}) {
    tests += TextOf(std::string("tests/") + name);
  }
  // Line breaks of the formatter inside TEST(...) do not matter.
  tests = std::regex_replace(tests, std::regex("\\s+"), " ");
  const std::map<std::string, std::string> rows = Rows(TextOf("docs/waits.md"));
  EXPECT_EQ(rows.size(), static_cast<size_t>(kWaitSiteCount));
  for (int i = 0; i < kWaitSiteCount; ++i) {
    const std::string site = WaitSiteName(static_cast<WaitSite>(i));
    SCOPED_TRACE(site);
    ASSERT_EQ(rows.count(site), 1u);
    const std::string& row = rows.at(site);
    const std::regex test_name("`([A-Za-z]+)\\.([A-Za-z]+)`");
    int named = 0;
    for (std::sregex_iterator it(row.begin(), row.end(), test_name), end; it != end; ++it) {
      ++named;
      const std::string declared = "(" + (*it)[1].str() + ", " + (*it)[2].str() + ")";
      EXPECT_THAT(tests, ::testing::HasSubstr(declared));
    }
    EXPECT_GT(named, 0);
  }
}

}  // namespace
}  // namespace pinion
