#include "pinion/device/emulated/simulation.h"

#include <array>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/emulated/engines.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class SimulationTest : public ::testing::Test {
 protected:
  SimulationTest() {
    options_.abort_on_race = false;
    simulation_.AddMemory(bytes_.data(), bytes_.size(), Simulation::kHost, "the pinning");
  }

  // Copies bytes_[from] to bytes_[to] in `ms`.
  void Copy(int slot, int to, int from, double ms = 2) {
    CopyCost cost;
    cost.latency_ms = ms;
    simulation_.SubmitCopy(slot, "copy H2D", {{&bytes_[to], &bytes_[from], 1}}, cost);
  }

  EmulatedOptions options_;
  Simulation simulation_{options_, /*trace=*/nullptr};
  const int first_ = simulation_.AddStream(0, "emu:0/first");
  const int second_ = simulation_.AddStream(0, "emu:0/second");
  std::array<char, 3> bytes_ = {'a', 'b', 'c'};
};

TEST_F(SimulationTest, ACopyTakesEffectWhenTheHostWaitsForIt) {
  Copy(first_, 1, 0);
  EXPECT_EQ(bytes_[1], 'b');
  EXPECT_THAT(simulation_.Synchronize(first_), IsOk());
  EXPECT_EQ(bytes_[1], 'a');
  EXPECT_DOUBLE_EQ(simulation_.time().now_ms(), 2);
}

TEST_F(SimulationTest, AWaitOrdersTimeBytesAndAccesses) {
  Copy(first_, 1, 0);
  simulation_.Wait(second_, simulation_.Moment(first_));
  Copy(second_, 2, 1);
  EXPECT_THAT(simulation_.Synchronize(second_), IsOk());
  EXPECT_EQ(bytes_[2], 'a');
  EXPECT_DOUBLE_EQ(simulation_.time().now_ms(), 4);
  EXPECT_THAT(simulation_.races(), IsEmpty());
}

TEST_F(SimulationTest, WithoutAWaitItIsARaceOfBothStreams) {
  Copy(first_, 1, 0);
  Copy(second_, 2, 1);
  EXPECT_THAT(simulation_.races(),
              ElementsAre(AllOf(HasSubstr("emu:0/first"), HasSubstr("emu:0/second"))));
}

TEST_F(SimulationTest, TheHostMayTouchWhatItHasObserved) {
  Copy(first_, 1, 0);
  const StreamMoment moment = simulation_.Moment(first_);
  EXPECT_THAT(simulation_.BlockUntil(moment.point), IsOk());
  simulation_.Observe(moment);
  simulation_.HostAccess(&bytes_[1], 1, /*write=*/true);
  EXPECT_THAT(simulation_.races(), IsEmpty());
}

TEST_F(SimulationTest, TheHostThatDoesNotLookHasARace) {
  Copy(first_, 1, 0);
  EXPECT_THAT(simulation_.BlockUntil(simulation_.Moment(first_).point), IsOk());
  simulation_.HostAccess(&bytes_[1], 1, /*write=*/true);
  EXPECT_EQ(simulation_.races().size(), 1u);
}

TEST_F(SimulationTest, NothingBehindAStuckCopyIsEverDone) {
  Copy(first_, 1, 0, kForever);
  Copy(first_, 2, 0);
  EXPECT_FALSE(simulation_.Force(simulation_.Moment(first_).point));
  EXPECT_THAT(simulation_.Synchronize(first_),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("stuck")));
  EXPECT_THAT(bytes_, ElementsAre('a', 'b', 'c'));
}

TEST_F(SimulationTest, ACopyInsideADeviceTakesItsComputeEngine) {
  simulation_.SubmitCopyInside(first_, {&bytes_[1], &bytes_[0], 1});
  EXPECT_THAT(simulation_.Synchronize(first_), IsOk());
  EXPECT_EQ(bytes_[1], 'a');
  EXPECT_EQ(simulation_.time().stats(0).kernels, 1u);
  EXPECT_EQ(simulation_.time().stats(0).copies, 0u);
}

}  // namespace
}  // namespace pinion
