// wait_sites.md lists every wait site, with tests that fail without the wait.

#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/hooks/wait_sites.h"
#include "pinion/tests/support/run_program.h"

namespace pinion::testing {
namespace {

// Returns the rows of the table, by site.
std::multimap<std::string, std::string> Rows() {
  std::multimap<std::string, std::string> rows;
  std::istringstream lines(FileContents("tests/hooks/wait_sites.md"));
  const std::regex row("^\\| `(k[A-Za-z]+)` \\|.*");
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (std::regex_match(line, match, row)) rows.emplace(match[1], line);
  }
  return rows;
}

// Returns "Suite.Test", and "Suite.Test/parameter" for parameterized tests.
std::set<std::string> TestsOf(const std::string& program) {
  std::set<std::string> tests;
  std::istringstream lines(
      RunProgram("env -u XML_OUTPUT_FILE " + program + " --gtest_list_tests").out);
  std::string suite;
  for (std::string line; std::getline(lines, line);) {
    line = line.substr(0, line.find("  #"));
    if (!line.starts_with("  ")) {
      suite = line.substr(line.find('/') + 1);  // drops the name of the instantiation
    } else {
      tests.insert(suite + line.substr(2));
    }
  }
  EXPECT_FALSE(tests.empty()) << program;
  return tests;
}

TEST(WaitsDocTest, ItsRowsAreTheSitesOfEngineAndHooks) {
  std::vector<std::string> sites(kEngineWaits.begin(), kEngineWaits.end());
  sites.insert(sites.end(), kHooksWaits.begin(), kHooksWaits.end());
  std::vector<std::string> documented;
  for (const auto& [site, row] : Rows()) documented.push_back(site);
  EXPECT_THAT(documented, ::testing::UnorderedElementsAreArray(sites));
}

TEST(WaitsDocTest, EveryRowNamesTestsThatThereAreForItsSite) {
  std::set<std::string> tests;
  for (const char* program :
       {"tests/engine/wait_site_mutation_test", "tests/hooks/activations/wait_sites_test"}) {
    tests.merge(TestsOf(program));
  }
  for (const auto& [site, row] : Rows()) {
    SCOPED_TRACE(site);
    const std::regex test_name("`([A-Za-z]+\\.[A-Za-z]+)`");
    int named = 0;
    for (std::sregex_iterator it(row.begin(), row.end(), test_name), end; it != end; ++it) {
      ++named;
      const std::string test = (*it)[1];
      EXPECT_TRUE(tests.contains(test) || tests.contains(test + "/" + site)) << test;
    }
    EXPECT_GT(named, 0);
  }
}

}  // namespace
}  // namespace pinion::testing
