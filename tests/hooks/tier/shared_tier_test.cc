// Checks that a session and pin_memory() share one pool and one engine per device.

#include <ATen/ops/rand.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/pin_memory/torch_host_allocator_fixture.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kSavedBytes = 4 * kMiB;

OffloadOptions SameOptions() {
  OffloadOptions options;
  options.allocator = Options();
  options.link = AssumedLink();
  return options;
}

class SharedTierTest : public TorchHostAllocatorFixture {
 protected:
  // Saves one tensor of kSavedBytes in forward, which is offloaded.
  static at::Tensor Forward(const std::shared_ptr<OffloadSession>& session) {
    const at::Tensor x =
        at::rand({kSavedBytes / 4}, at::TensorOptions().device(c10::Device(kEmu, 0)))
            .requires_grad_();
    const OffloadScope scope(session);
    return x.mul(2).sin().sum();
  }
};

TEST_F(SharedTierTest, SavedTensorsAndPinnedOnesAreInOnePool) {
  const std::shared_ptr<OffloadSession> session =
      OffloadSession::Create(SameOptions(), Backend()).value();
  const uint64_t before_bytes = Stats().requested_bytes.current;
  const at::Tensor pinned = Pinned(kMiB);
  EXPECT_EQ(session->GetAllocatorStats().requested_bytes.current, before_bytes + kMiB);
  const at::Tensor loss = Forward(session);
  EXPECT_EQ(session->GetStats().offloaded, 1u);
  EXPECT_EQ(Stats().requested_bytes.current, before_bytes + kMiB + kSavedBytes);
  loss.backward();
  EXPECT_EQ(session->GetStats().unpacked, 1u);
}

TEST_F(SharedTierTest, TogetherTheyKeepTheLimit) {
  const std::shared_ptr<OffloadSession> session =
      OffloadSession::Create(SameOptions(), Backend()).value();
  std::vector<at::Tensor> pinned;
  for (uint64_t bytes = 0; bytes + 2 * kWholeSegment <= kLimitBytes; bytes += kWholeSegment) {
    pinned.push_back(Pinned(kWholeSegment));
  }
  const at::Tensor loss = Forward(session);
  EXPECT_EQ(session->GetStats().kept_no_host_memory, 1u) << "4 MiB do not fit any more";
  pinned.clear();
  Forward(session);
  EXPECT_EQ(session->GetStats().offloaded, 1u);
}

TEST_F(SharedTierTest, ADeviceThatTheSessionHasSetUpIsNotOpenedAgain) {
  const std::shared_ptr<OffloadSession> session =
      OffloadSession::Create(SameOptions(), Backend()).value();
  Forward(session);
  const int opened = g_opened;
  const at::Tensor pinned = Pinned(kMiB);
  OnDevice(kMiB).copy_(pinned, /*non_blocking=*/true);
  EXPECT_EQ(g_opened, opened);
}

TEST_F(SharedTierTest, ASessionWithAnotherBudgetIsRefusedByName) {
  OffloadOptions options = SameOptions();
  options.allocator.max_locked_bytes = kLimitBytes / 2;
  EXPECT_THAT(OffloadSession::Create(options, Backend()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("allocator.max_locked_bytes is 67108864 and not 33554432")));
}

}  // namespace
}  // namespace pinion::testing
