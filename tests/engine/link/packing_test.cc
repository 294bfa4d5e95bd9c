#include "pinion/engine/link/packing.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/link/link_calibration.h"

namespace pinion {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::SizeIs;

// Similar to PCIe 5: 55 GB/s, half of it at 165 KB, 1 us per additional piece.
LinkCalibration Pcie5() {
  LinkCalibration link;
  link.h2d = {.fixed_us = 3, .piece_us = 1, .gb_per_s = 55};
  link.d2h = {.fixed_us = 3, .piece_us = 1, .gb_per_s = 55};
  return link;
}

std::vector<size_t> GroupSizes(const PackingPlan& plan) {
  std::vector<size_t> sizes;
  for (const PackingPlan::Group& group : plan.groups) sizes.push_back(group.pieces.size());
  return sizes;
}

double TransferUs(const LinkCurve& curve, uint64_t pieces, uint64_t size_bytes) {
  // A piece never costs more than its own copy, whatever a noisy measurement says.
  const double piece_us = std::min(curve.piece_us, curve.fixed_us);
  return curve.CopyUs(size_bytes) + static_cast<double>(pieces - 1) * piece_us;
}

// Microseconds of link and device that the plan takes, out and back, if nothing overlaps.
double PlanUs(const PackingPlan& plan, absl::Span<const uint64_t> sizes,
              const LinkCalibration& link) {
  if (plan.groups.empty()) return 0;
  double gather_us = 0;
  uint64_t pieces_out = 0;
  uint64_t bytes_out = 0;
  uint64_t bytes_in = 0;
  for (const PackingPlan::Group& group : plan.groups) {
    bytes_in += group.size_bytes;
    if (group.gather) {
      gather_us += GatherUs(group.pieces.size(), group.size_bytes);
      pieces_out += 1;
      bytes_out += group.size_bytes;
      continue;
    }
    pieces_out += group.pieces.size();
    for (const size_t piece : group.pieces) bytes_out += sizes[piece];
  }
  return gather_us + TransferUs(link.d2h, pieces_out, bytes_out) +
         TransferUs(link.h2d, plan.groups.size(), bytes_in);
}

TEST(PackingPlan, ManySmallPiecesAreGatheredIntoOneBlock) {
  const std::vector<uint64_t> sizes(100, 4 * kKiB);
  const PackingPlan plan = PlanPacking(sizes, Pcie5());
  ASSERT_THAT(plan.groups, SizeIs(1));
  EXPECT_TRUE(plan.groups[0].gather);
  EXPECT_EQ(plan.groups[0].size_bytes, 400 * kKiB);
}

TEST(PackingPlan, ALargePieceBesideThemDoesNotChangeThat) {
  std::vector<uint64_t> sizes(100, 4 * kKiB);
  sizes.push_back(kMiB);
  EXPECT_TRUE(PlanPacking(sizes, Pcie5()).groups[0].gather);
}

TEST(PackingPlan, AGatherCostsALaunchPer64PiecesAndTwoPassesOverTheBytes) {
  EXPECT_DOUBLE_EQ(GatherUs(64, 250'000), 5 + 2 * 0.5);
  EXPECT_DOUBLE_EQ(GatherUs(65, 250'000), 2 * 5 + 2 * 0.5);
}

// Whether three pieces, of which a gather saves two, are gathered.
bool Gathers(const std::vector<uint64_t>& sizes, double piece_us, double gb_per_s) {
  LinkCalibration link;
  link.h2d = link.d2h = {.fixed_us = 8, .piece_us = piece_us, .gb_per_s = gb_per_s};
  return PlanPacking(sizes, link).groups[0].gather;
}

// On a link that moves a page of packing in a microsecond. A gather takes a little more than 5 us.
TEST(PackingPlan, AGatherPaysForPaddingToo) {
  EXPECT_TRUE(Gathers({512, 512, 512}, /*piece_us=*/3, /*gb_per_s=*/0.512));
  EXPECT_FALSE(Gathers({1, 1, 1}, /*piece_us=*/3, /*gb_per_s=*/0.512)) << "1022 bytes of padding";
  EXPECT_TRUE(Gathers({1, 1, 1}, /*piece_us=*/4, /*gb_per_s=*/0.512));
}

TEST(PackingPlan, WhereAGatherGainsNothingThereIsNone) {
  const std::vector<uint64_t> sizes = {512, 512, 248'976};
  ASSERT_EQ(GatherUs(3, 250'000), 2 * 3);
  EXPECT_FALSE(Gathers(sizes, /*piece_us=*/3, /*gb_per_s=*/100));
  EXPECT_TRUE(Gathers(sizes, /*piece_us=*/3.001, /*gb_per_s=*/100));
}

// A kernel on the compute stream costs more than what three pieces cost the link.
TEST(PackingPlan, AFewSmallPiecesShareABlockWithoutAGather) {
  const std::vector<uint64_t> sizes(3, 4 * kKiB);
  const PackingPlan plan = PlanPacking(sizes, Pcie5());
  ASSERT_THAT(plan.groups, SizeIs(1));
  EXPECT_FALSE(plan.groups[0].gather);
}

TEST(PackingPlan, AFullBatchSpendsASeventeenthOfItsTimeOnFixedCosts) {
  LinkCalibration link = Pcie5();
  EXPECT_NEAR(link.d2h.CopyUs(FullBatchBytes(link)), 17 * link.d2h.fixed_us, 0.01);
  link.h2d.fixed_us *= 2;  // the more expensive direction decides
  EXPECT_NEAR(link.h2d.CopyUs(FullBatchBytes(link)), 17 * link.h2d.fixed_us, 0.01);
}

TEST(PackingPlan, ALinkIsKnownOnceBothDirectionsAre) {
  LinkCalibration slow;
  slow.h2d = slow.d2h = {.fixed_us = 3, .piece_us = 2, .gb_per_s = 0.5};
  EXPECT_NEAR(FullBatchBytes(slow), 16 * 1500, 1);
  EXPECT_EQ(LargestSmallPiece(slow), 512u);
  LinkCalibration h2d_only = Pcie5();
  h2d_only.d2h = LinkCurve();
  LinkCalibration d2h_only = Pcie5();
  d2h_only.h2d = LinkCurve();
  for (const LinkCalibration& link : {LinkCalibration(), h2d_only, d2h_only}) {
    EXPECT_EQ(FullBatchBytes(link), kMiB);
    EXPECT_EQ(LargestSmallPiece(link), 0u);
  }
}

TEST(PackingPlan, ALinkThatIsAssumedIsKnownInBothDirections) {
  const LinkCalibration link = AssumedLink();
  for (const LinkCurve& curve : {link.h2d, link.d2h}) {
    EXPECT_DOUBLE_EQ(curve.HalfPerformanceBytes(), 60e3) << "3 us at PCIe 4's 20 GB/s";
    EXPECT_LT(curve.piece_us, curve.fixed_us);
  }
  EXPECT_EQ(LargestSmallPiece(link), 20'000u / 512 * 512);
  EXPECT_EQ(link.h2d_duplex_gb_per_s, link.d2h_duplex_gb_per_s);
  EXPECT_LT(link.d2h_duplex_gb_per_s, link.d2h.gb_per_s);
}

TEST(PackingPlan, LargePiecesStayAlone) {
  const std::vector<uint64_t> sizes(100, kMiB);
  EXPECT_THAT(GroupSizes(PlanPacking(sizes, Pcie5())), Each(1));
}

TEST(PackingPlan, SmallPiecesBetweenLargeOnesFindEachOther) {
  const PackingPlan plan =
      PlanPacking({kMiB, 4 * kKiB, kMiB, 8 * kKiB, 2 * kMiB, 16 * kKiB}, Pcie5());
  ASSERT_THAT(plan.groups, SizeIs(4));
  EXPECT_THAT(plan.groups[1].pieces, ElementsAre(1, 3, 5));
  EXPECT_THAT(plan.groups[1].offsets, ElementsAre(0, 4 * kKiB, 12 * kKiB));
}

TEST(PackingPlan, NothingSharesABlockWherePiecesAreFree) {
  LinkCalibration link = Pcie5();
  link.h2d.piece_us = 0;
  EXPECT_EQ(LargestSmallPiece(link), 0u);
  EXPECT_THAT(GroupSizes(PlanPacking({512, 512, 512}, link)), ElementsAre(1, 1, 1));
}

TEST(PackingPlan, NothingSharesABlockOnALinkThatNobodyHasMeasured) {
  EXPECT_THAT(GroupSizes(PlanPacking({512, 512, 512}, LinkCalibration())), ElementsAre(1, 1, 1));
}

TEST(PackingPlan, APieceIsSmallWhileItsBytesTakeNoLongerThanItsFixedCost) {
  const uint64_t limit = LargestSmallPiece(Pcie5());
  EXPECT_EQ(limit, 55000 / 512 * 512u);
  EXPECT_THAT(GroupSizes(PlanPacking({limit, limit}, Pcie5())), ElementsAre(2));
  EXPECT_THAT(GroupSizes(PlanPacking({limit + 1, limit + 1}, Pcie5())), ElementsAre(1, 1));
}

TEST(PackingPlan, NothingComesOfNothing) {
  EXPECT_THAT(PlanPacking({}, Pcie5()).groups, SizeIs(0));
  EXPECT_EQ(PlanUs(PackingPlan(), {}, Pcie5()), 0);
}

TEST(PackingPlanDeathTest, AnEmptyPieceIsTheCallersBug) {
  EXPECT_DEATH(PlanPacking({512, 0}, Pcie5()), "piece 1 is empty");
}

// --- Random links and pieces ---

class PackingPlanSeeds : public ::testing::TestWithParam<uint64_t> {
 protected:
  double Uniform(double from, double to) {
    return std::uniform_real_distribution<double>(from, to)(random_);
  }
  uint64_t Integer(uint64_t from, uint64_t to) {
    return std::uniform_int_distribution<uint64_t>(from, to)(random_);
  }
  LinkCurve AnyCurve() {
    // A measured piece may cost more than a copy, or nothing.
    return {Uniform(0, 10), Integer(0, 3) == 0 ? 0 : Uniform(0, 12), Uniform(0.5, 500)};
  }
  LinkCalibration AnyLink() {
    LinkCalibration link;
    link.h2d = AnyCurve();
    link.d2h = AnyCurve();
    return link;
  }
  std::vector<uint64_t> AnySizes() {
    std::vector<uint64_t> sizes(Integer(1, 200));
    for (uint64_t& size : sizes) size = Integer(1, uint64_t{1} << Integer(1, 22));
    return sizes;
  }

  std::mt19937_64 random_{GetParam()};
};

TEST_P(PackingPlanSeeds, EveryPieceHasAPlaceOfItsOwnThatIsAligned) {
  for (int round = 0; round < 20; ++round) {
    const std::vector<uint64_t> sizes = AnySizes();
    const PackingPlan plan = PlanPacking(sizes, AnyLink());
    std::vector<int> seen(sizes.size(), 0);
    size_t first = 0;
    for (const PackingPlan::Group& group : plan.groups) {
      ASSERT_FALSE(group.pieces.empty());
      ASSERT_EQ(group.pieces.size(), group.offsets.size());
      EXPECT_TRUE(std::is_sorted(group.pieces.begin(), group.pieces.end()));
      EXPECT_GE(group.pieces.front(), first);
      first = group.pieces.front();
      EXPECT_EQ(group.offsets.front(), 0u);
      uint64_t end = 0;
      for (size_t i = 0; i < group.pieces.size(); ++i) {
        ++seen[group.pieces[i]];
        EXPECT_EQ(group.offsets[i] % kPackAlignmentBytes, 0u);
        EXPECT_GE(group.offsets[i], end);
        EXPECT_LT(group.offsets[i], end + kPackAlignmentBytes);
        end = group.offsets[i] + sizes[group.pieces[i]];
      }
      EXPECT_EQ(group.size_bytes, end);
      EXPECT_TRUE(group.pieces.size() > 1 || !group.gather);
    }
    EXPECT_THAT(seen, Each(1));
  }
}

TEST_P(PackingPlanSeeds, ThePlanIsNeverSlowerThanTheBatchOrTheLoop) {
  for (int round = 0; round < 20; ++round) {
    const std::vector<uint64_t> sizes = AnySizes();
    const LinkCalibration link = AnyLink();
    const double plan_us = PlanUs(PlanPacking(sizes, link), sizes, link);
    const uint64_t bytes = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
    double loop_us = 0;
    for (const uint64_t size : sizes) loop_us += link.d2h.CopyUs(size) + link.h2d.CopyUs(size);
    const double batch_us =
        TransferUs(link.d2h, sizes.size(), bytes) + TransferUs(link.h2d, sizes.size(), bytes);
    EXPECT_LE(plan_us, loop_us * (1 + 1e-9));
    EXPECT_LE(plan_us, batch_us * (1 + 1e-9));
  }
}

TEST_P(PackingPlanSeeds, AnotherPieceNeverMakesThePlanFasterNorSplitsAGroup) {
  for (int round = 0; round < 20; ++round) {
    std::vector<uint64_t> sizes = AnySizes();
    const LinkCalibration link = AnyLink();
    const PackingPlan before = PlanPacking(sizes, link);
    const double before_us = PlanUs(before, sizes, link);
    sizes.push_back(Integer(1, 64 * kKiB));
    const PackingPlan after = PlanPacking(sizes, link);
    EXPECT_GE(PlanUs(after, sizes, link), before_us * (1 - 1e-9));
    ASSERT_GE(after.groups.size(), before.groups.size());
    for (size_t i = 0; i < before.groups.size(); ++i) {
      EXPECT_GE(after.groups[i].pieces.size(), before.groups[i].pieces.size());
    }
  }
}

TEST_P(PackingPlanSeeds, DearerPiecesNeverShareLess) {
  for (int round = 0; round < 20; ++round) {
    const std::vector<uint64_t> sizes = AnySizes();
    LinkCalibration link = AnyLink();
    const size_t before = PlanPacking(sizes, link).groups.size();
    for (LinkCurve* curve : {&link.h2d, &link.d2h}) {
      curve->piece_us *= 2;
      curve->fixed_us *= 2;
    }
    EXPECT_LE(PlanPacking(sizes, link).groups.size(), before);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, PackingPlanSeeds, ::testing::Range<uint64_t>(1, 21),
                         [](const auto& info) { return "Seed" + std::to_string(info.param); });

}  // namespace
}  // namespace pinion
