#include "pinion/bench/engine_cases.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

TEST(EngineCasesTest, ACaseSaysInItsNameWhatItIs) {
  EXPECT_EQ(CaseName({.section = BenchSection::kCopies,
                      .flow = BenchFlow::kDuplex,
                      .method = BenchMethod::kEngine,
                      .transfers = 4,
                      .piece_bytes = kGiB}),
            "copies/duplex/engine/4x1GiB");
  EXPECT_EQ(CaseName({.section = BenchSection::kPieces,
                      .flow = BenchFlow::kHostToDevice,
                      .method = BenchMethod::kRaw,
                      .pieces = 256,
                      .piece_bytes = 4 * kKiB}),
            "pieces/H2D/loop/256x4KiB");
  EXPECT_EQ(CaseName({.section = BenchSection::kCompute,
                      .method = BenchMethod::kRaw,
                      .setting = BenchSetting::kAfterCompute,
                      .piece_bytes = kMiB}),
            "compute/D2H/raw/1x1MiB/after");
  EXPECT_EQ(CaseName({.section = BenchSection::kSubmit,
                      .method = BenchMethod::kScattered,
                      .setting = BenchSetting::kEventsPending,
                      .pieces = 16,
                      .piece_bytes = 256}),
            "submit/D2H/scattered/16/pending");
}

class EngineCasesGridTest : public ::testing::TestWithParam<bool> {
 protected:
  const std::vector<BenchCase> cases_ = EngineBenchCases(/*quick=*/GetParam());
};

TEST_P(EngineCasesGridTest, NoTwoCasesHaveTheSameName) {
  std::set<std::string> names;
  for (const BenchCase& of : cases_) EXPECT_TRUE(names.insert(CaseName(of)).second) << CaseName(of);
}

TEST_P(EngineCasesGridTest, EveryMethodHasItsBaseline) {
  for (const BenchCase& of : cases_) {
    if (of.method != BenchMethod::kEngine && of.method != BenchMethod::kPacked) continue;
    BenchCase baseline = of;
    baseline.method = BenchMethod::kRaw;
    EXPECT_TRUE(std::find(cases_.begin(), cases_.end(), baseline) != cases_.end()) << CaseName(of);
  }
}

INSTANTIATE_TEST_SUITE_P(All, EngineCasesGridTest, ::testing::Bool());

TEST(EngineCasesTest, AQuickRunIsPartOfAFullOne) {
  const std::vector<BenchCase> all = EngineBenchCases(/*quick=*/false);
  for (const BenchCase& of : EngineBenchCases(/*quick=*/true)) {
    EXPECT_TRUE(std::find(all.begin(), all.end(), of) != all.end()) << CaseName(of);
  }
}

TEST(EngineCasesTest, BytesPerSecondCountBothDirectionsAndAllTransfers) {
  BenchRow row;
  row.of = {.flow = BenchFlow::kDuplex, .transfers = 5, .pieces = 10, .piece_bytes = 1000};
  row.time.ms = 0.1;
  EXPECT_EQ(CaseBytes(row.of), 100'000);
  EXPECT_DOUBLE_EQ(GbPerS(row), 1.0);
}

}  // namespace
}  // namespace pinion
