#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/bench/engine_cases.h"
#include "pinion/bench/goals.h"

namespace pinion {
namespace {

BenchRow Row(BenchCase of, double ms) { return {of, {.ms = ms}}; }

BenchCase Copies(BenchMethod method, uint64_t transfers, uint64_t size_bytes) {
  return {.section = BenchSection::kCopies,
          .method = method,
          .transfers = transfers,
          .piece_bytes = size_bytes};
}

BenchCase Pieces(BenchMethod method, uint64_t pieces, uint64_t piece_bytes) {
  return {.section = BenchSection::kPieces,
          .method = method,
          .pieces = pieces,
          .piece_bytes = piece_bytes};
}

std::vector<Goal> EngineGoals(const std::vector<BenchRow>& rows, const LinkCalibration& link) {
  BenchReport report;
  AddEngineGoals(rows, link, report);
  return report.goals();
}

std::optional<double> Value(const std::vector<Goal>& goals, const std::string& start) {
  for (const Goal& goal : goals) {
    if (goal.name.rfind(start, 0) == 0) return goal.value;
  }
  ADD_FAILURE() << "no goal starts with " << start;
  return std::nullopt;
}

TEST(EngineGoalsTest, WithoutRowsThereIsNothingToJudge) {
  EXPECT_TRUE(EngineGoals({}, {}).empty());
}

TEST(EngineGoalsTest, TheWorstSizeDecides) {
  const std::vector<BenchRow> rows = {Row(Copies(BenchMethod::kRaw, 4, kMiB), 1),
                                      Row(Copies(BenchMethod::kEngine, 4, kMiB), 1.25),
                                      Row(Copies(BenchMethod::kRaw, 4, kGiB), 100),
                                      Row(Copies(BenchMethod::kEngine, 4, kGiB), 100)};
  EXPECT_EQ(Value(EngineGoals(rows, {}), "copies D2H"), 0.8);
}

TEST(EngineGoalsTest, WithoutItsBaselineARowShowsNothing) {
  const std::vector<BenchRow> rows = {Row(Copies(BenchMethod::kRaw, 4, kMiB), 1),
                                      Row(Copies(BenchMethod::kEngine, 4, kMiB), 1),
                                      Row(Copies(BenchMethod::kEngine, 4, kGiB), 1)};
  const std::vector<Goal> goals = EngineGoals(rows, {});
  EXPECT_EQ(Value(goals, "copies D2H"), std::nullopt);
  EXPECT_EQ(Value(goals, "copies H2D"), std::nullopt);
  EXPECT_FALSE(goals[0].met());
}

TEST(EngineGoalsTest, FewPiecesAndLargeOnesAreNotManySmallOnes) {
  std::vector<BenchRow> rows;
  for (const auto& [pieces, piece_bytes, packed_ms] :
       {std::tuple(16, 4 * kKiB, 1.0), std::tuple(64, 16 * kKiB, 0.1),
        std::tuple(1024, 4 * kKiB, 0.05), std::tuple(64, 256 * kKiB, 1.0)}) {
    rows.push_back(Row(Pieces(BenchMethod::kRaw, pieces, piece_bytes), 1));
    rows.push_back(Row(Pieces(BenchMethod::kPacked, pieces, piece_bytes), packed_ms));
  }
  EXPECT_EQ(Value(EngineGoals(rows, {}), "pieces D2H, 64 and more of 4 to 16 KiB"), 10.0);
}

TEST(EngineGoalsTest, TheGainOfPackingIsMeasuredAgainstTheLinks) {
  LinkCalibration link;
  link.d2h = {.fixed_us = 3, .gb_per_s = 65.536};  // 64 KiB in 1 us: packing gains 4 times
  const std::vector<BenchRow> rows = {Row(Pieces(BenchMethod::kRaw, 256, 64 * kKiB), 1),
                                      Row(Pieces(BenchMethod::kPacked, 256, 64 * kKiB), 1),
                                      Row(Pieces(BenchMethod::kRaw, 1024, 64 * kKiB), 3),
                                      Row(Pieces(BenchMethod::kPacked, 1024, 64 * kKiB), 1)};
  EXPECT_EQ(Value(EngineGoals(rows, link), "pieces D2H, 1024 of 64 KiB"), 0.75);
}

TEST(EngineGoalsTest, ComputeIsSlowedDownByTheEngineNoMoreThanByRawCopies) {
  BenchCase of = {.section = BenchSection::kCompute, .setting = BenchSetting::kBesideCompute};
  std::vector<BenchRow> rows = {{of, {.ms = 1, .compute_ms = 3, .compute_alone_ms = 2}}};
  of.method = BenchMethod::kEngine;
  rows.push_back({of, {.ms = 2, .compute_ms = 6, .compute_alone_ms = 2}});
  const std::vector<Goal> goals = EngineGoals(rows, {});
  EXPECT_EQ(Value(goals, "copies with compute"), 0.5);
  EXPECT_EQ(Value(goals, "compute with copies"), 2.0);
}

TEST(EngineGoalsTest, SubmitHasAPriceForTheBatchAndOneForEachPiece) {
  BenchCase of = {.section = BenchSection::kSubmit, .method = BenchMethod::kAdjacent, .pieces = 10};
  std::vector<BenchRow> rows = {Row(of, 1.5e-3)};  // of 2 us + 10 x 100 ns
  EXPECT_EQ(Value(EngineGoals(rows, {}), "Submit"), 0.5);
  of.pieces = 20;
  rows.push_back(Row(of, 8e-3));
  EXPECT_EQ(Value(EngineGoals(rows, {}), "Submit"), 2.0);
}

}  // namespace
}  // namespace pinion
