#include "pinion/allocator/ram_watermark.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeHost;
using ::pinion::testing::IsOk;
using ::pinion::testing::RunThreads;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// 100 GiB of RAM; a growth of n GiB is n percent.
class RamWatermarkTest : public ::testing::Test {
 protected:
  RamWatermarkTest() {
    previous_sink_ = SetLogSink([this](LogSeverity severity, const std::string& message) {
      if (severity == LogSeverity::kWarning) warnings_.push_back(message);
    });
  }
  ~RamWatermarkTest() override { SetLogSink(std::move(previous_sink_)); }

  void SetUsedPercent(uint64_t percent) { host_.SetMeminfo(100 * kGiB, (100 - percent) * kGiB); }

  FakeHost host_;
  AllocatorOptions options_;
  absl::Time now_ = absl::UnixEpoch();
  std::vector<std::string> warnings_;
  LogSink previous_sink_;
};

TEST_F(RamWatermarkTest, AHostThatCannotBeReadHasNoMarks) {
  RamWatermark watermark(options_, host_.Probe());
  EXPECT_THAT(watermark.AdmitGrowth(1000 * kGiB), IsOk());
}

TEST_F(RamWatermarkTest, TheHighMarkIsJudgedAfterTheGrowth) {
  SetUsedPercent(80);
  RamWatermark watermark(options_, host_.Probe());
  EXPECT_THAT(watermark.AdmitGrowth(10 * kGiB), IsOk());
  EXPECT_THAT(watermark.AdmitGrowth(11 * kGiB),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("11 GiB"), HasSubstr("80 GiB of 100 GiB"),
                             HasSubstr("91.0 %"), HasSubstr("high_percent (90)"))));
}

TEST_F(RamWatermarkTest, AGrowthThatDoesNotFitACgroupIsRefusedByItsName) {
  SetUsedPercent(10);
  host_.Write("proc/self/cgroup", "0::/pod\n");
  host_.Write("cgroup/pod/memory.max", "1073741824\n");
  host_.Write("cgroup/pod/memory.current", "0\n");
  RamWatermark watermark(options_, host_.Probe());
  EXPECT_THAT(watermark.AdmitGrowth(kGiB), IsOk());
  EXPECT_THAT(watermark.AdmitGrowth(kGiB + 1),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("cgroup /pod memory.max")));
}

// Ranks that each look first and then allocate pass the mark together.
TEST_F(RamWatermarkTest, GrowersThatAreNotVisibleYetAreCountedIn) {
  SetUsedPercent(80);
  RamWatermark watermark(options_, host_.Probe());
  std::optional<absl::StatusOr<RamWatermark::Growth>> first = watermark.AdmitGrowth(6 * kGiB);
  ASSERT_THAT(*first, IsOk());
  EXPECT_THAT(watermark.AdmitGrowth(6 * kGiB), Not(IsOk()));
  first.reset();
  EXPECT_THAT(watermark.AdmitGrowth(6 * kGiB), IsOk());
}

TEST_F(RamWatermarkTest, ThreadsThatGrowAtOnceDoNotPassTheMarkTogether) {
  SetUsedPercent(80);
  RamWatermark watermark(options_, host_.Probe());
  Mutex mu;
  std::vector<RamWatermark::Growth> admitted;
  RunThreads(8, [&](int) {
    absl::StatusOr<RamWatermark::Growth> growth = watermark.AdmitGrowth(3 * kGiB);
    if (!growth.ok()) return;
    MutexLock lock(mu);
    admitted.push_back(*std::move(growth));
  });
  EXPECT_LE(admitted.size(), 3u);
}

TEST_F(RamWatermarkTest, EachGrowthAboveTheWarnMarkIsCountedButOneAMinuteIsLogged) {
  SetUsedPercent(65);
  RamWatermark watermark(options_, host_.Probe(), [this] { return now_; });
  for (int i = 0; i < 3; ++i) EXPECT_THAT(watermark.AdmitGrowth(kGiB), IsOk());
  EXPECT_EQ(watermark.warnings(), 3u);
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_THAT(warnings_[0], AllOf(HasSubstr("65.0 %"), HasSubstr("warn_percent is 60")));
  now_ += absl::Minutes(2);
  EXPECT_THAT(watermark.AdmitGrowth(kGiB), IsOk());
  EXPECT_EQ(warnings_.size(), 2u);
}

TEST_F(RamWatermarkTest, BelowTheWarnMarkNothingIsSaid) {
  SetUsedPercent(50);
  RamWatermark watermark(options_, host_.Probe());
  EXPECT_THAT(watermark.AdmitGrowth(kGiB), IsOk());
  EXPECT_EQ(watermark.warnings(), 0u);
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(RamWatermarkTest, AboveTheHighMarkTrimmingGoesDownToTheLowMark) {
  SetUsedPercent(92);
  RamWatermark watermark(options_, host_.Probe());
  const uint64_t bytes = watermark.BytesToGiveBack(kMiB);
  EXPECT_GE(bytes, 7 * kGiB);
  EXPECT_LE(bytes, 7 * kGiB + kMiB);
}

TEST_F(RamWatermarkTest, BelowTheHighMarkNothingNeedsToGo) {
  SetUsedPercent(87);
  RamWatermark watermark(options_, host_.Probe());
  EXPECT_EQ(watermark.BytesToGiveBack(kMiB), 0u);
}

}  // namespace
}  // namespace pinion
