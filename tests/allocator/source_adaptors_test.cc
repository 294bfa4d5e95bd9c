// What each adaptor adds to the source that it wraps.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/adaptors/delaying_source.h"
#include "pinion/allocator/adaptors/failing_source.h"
#include "pinion/allocator/adaptors/limiting_source.h"
#include "pinion/allocator/adaptors/tracking_source.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::ChildProcess;
using ::pinion::testing::FakeSource;
using ::pinion::testing::IsOk;
using ::pinion::testing::RunThreads;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LimitingSourceTest, TheLimitIsReachedExactlyAndNamed) {
  LimitingSource source(std::make_shared<FakeSource>(), 3 * kMiB);
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment first, source.Allocate(2 * kMiB));
  EXPECT_THAT(source.Allocate(kMiB + 4096),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("more than 2 MiB"), HasSubstr("limit, 3 MiB"))));
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment second, source.Allocate(kMiB));
  EXPECT_EQ(source.taken_bytes(), 3 * kMiB);
  EXPECT_THAT(source.Free(first), IsOk());
  EXPECT_THAT(source.Free(second), IsOk());
  EXPECT_EQ(source.taken_bytes(), 0u);
}

TEST(LimitingSourceTest, WhatTheUpstreamRefusesIsNotTaken) {
  const auto upstream = std::make_shared<FakeSource>();
  upstream->FailCall(0);
  LimitingSource source(upstream, kMiB);
  EXPECT_THAT(source.Allocate(kMiB), Not(IsOk()));
  EXPECT_EQ(source.taken_bytes(), 0u);
}

TEST(LimitingSourceTest, ThreadsThatAskAtOnceDoNotPassTheLimit) {
  const auto upstream = std::make_shared<FakeSource>();
  LimitingSource source(upstream, 5 * kMiB);
  std::atomic<int> given{0};
  RunThreads(8, [&](int) {
    if (source.Allocate(kMiB).ok()) ++given;
  });
  EXPECT_EQ(given, 5);
  EXPECT_EQ(upstream->outstanding_bytes(), 5 * kMiB);
}

TEST(FailingSourceTest, TheCallsThatWereNamedFailAndNoOther) {
  FailingSource source(std::make_shared<FakeSource>());
  source.FailAllocate(1);
  source.FailAllocate(2, absl::StatusCode::kInternal);
  EXPECT_THAT(source.Allocate(kMiB), IsOk());
  EXPECT_THAT(source.Allocate(kMiB), StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(source.Allocate(kMiB), StatusIs(absl::StatusCode::kInternal));
  EXPECT_THAT(source.Allocate(kMiB), IsOk());
  EXPECT_EQ(source.calls(), 4u);
}

TEST(FailingSourceTest, AFreeThatFailsDoesNotReachTheUpstream) {
  const auto upstream = std::make_shared<FakeSource>();
  FailingSource source(upstream);
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source.Allocate(kMiB));
  source.FailEveryFree();
  EXPECT_THAT(source.Free(segment), StatusIs(absl::StatusCode::kInternal));
  EXPECT_EQ(upstream->outstanding_bytes(), kMiB);
}

TEST(FailingSourceTest, AChildOfForkIsNotTold) {
  FailingSource source(std::make_shared<FakeSource>());
  PINION_ASSERT_OK_AND_ASSIGN(const HostSegment segment, source.Allocate(kMiB));
  source.FailEveryFree();
  ChildProcess child([&] { EXPECT_THAT(source.Free(segment), IsOk()); });
  EXPECT_EQ(child.Wait(), 0);
}

TEST(DelayingSourceTest, MoreBytesTakeLonger) {
  DelayingSource::Delays delays;
  delays.per_call = absl::Milliseconds(1);
  delays.per_gib = absl::Seconds(1);
  DelayingSource source(std::make_shared<FakeSource>(), delays);
  const absl::Time start = absl::Now();
  EXPECT_THAT(source.Allocate(8 * kMiB), IsOk());
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(8));
}

TEST(TrackingSourceTest, TheReportNamesWhatIsHeldByStackAndSize) {
  TrackingSource source(std::make_shared<FakeSource>());
  std::vector<HostSegment> held;
  for (int i = 0; i < 3; ++i) held.push_back(*source.Allocate(2 * kMiB));
  held.push_back(*source.Allocate(kMiB));
  EXPECT_EQ(source.held_bytes(), 7 * kMiB);
  const std::string report = source.Report();
  EXPECT_THAT(report, HasSubstr("6 MiB in 3 segments"));
  EXPECT_THAT(report, HasSubstr("1 MiB in 1 segments"));
  EXPECT_LT(report.find("6 MiB"), report.find("1 MiB in"));
  EXPECT_THAT(report, HasSubstr("TrackingSourceTest"));
  for (const HostSegment& segment : held) EXPECT_THAT(source.Free(segment), IsOk());
  EXPECT_EQ(source.Report(), "");
}

TEST(TrackingSourceTest, WhatIsHeldAtTheEndIsLoggedAsALeak) {
  std::vector<std::string> lines;
  LogSink previous =
      SetLogSink([&](LogSeverity, const std::string& message) { lines.push_back(message); });
  { EXPECT_THAT(TrackingSource(std::make_shared<FakeSource>()).Allocate(kMiB), IsOk()); }
  { TrackingSource nothing(std::make_shared<FakeSource>()); }
  SetLogSink(std::move(previous));
  EXPECT_THAT(lines, ElementsAre(HasSubstr("1 MiB are held")));
}

TEST(TrackingSourceDeathTest, ASegmentThatIsNotHeldCannotBeFreed) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  TrackingSource source(std::make_shared<FakeSource>());
  HostSegment segment = *source.Allocate(kMiB);
  EXPECT_THAT(source.Free(segment), IsOk());
  EXPECT_DEATH((void)source.Free(segment), "does not hold 1 MiB");
}

}  // namespace
}  // namespace pinion
