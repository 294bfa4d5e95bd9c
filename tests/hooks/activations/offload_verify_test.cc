// Checks verify mode: it detects and names tensors whose bytes changed, and accepts right ones.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/forwarding_device.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

OffloadOptions Verifying(uint64_t window_bytes = 16 << 10) {
  OffloadOptions options = SmallWindows(window_bytes);
  options.verify = true;
  return options;
}

// Faults of the copy back.
enum class Fault { kNone, kFlippedBit, kSwappedElements, kShiftedByOne, kDropped };

class FaultyDevice : public ForwardingDevice {
 public:
  FaultyDevice(std::shared_ptr<EmulatedMachine> machine, Fault fault)
      : ForwardingDevice(machine->device(0)), machine_(std::move(machine)), fault_(fault) {}

  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    if (direction == CopyDirection::kDeviceToHost || fault_ == Fault::kNone) {
      return ForwardingDevice::CopyAsync(direction, pieces, stream);
    }
    std::vector<CopyPiece> wrong(pieces.begin(), pieces.end());
    const CopyPiece first = wrong.front();
    auto* const dst = static_cast<uint8_t*>(first.dst);
    const auto* const src = static_cast<const uint8_t*>(first.src);
    switch (fault_) {
      case Fault::kNone:
        break;
      case Fault::kFlippedBit: {
        // Flips the bit after the D2H copy wrote it, like a bad DIMM.
        EXPECT_TRUE(machine_->SynchronizeDevice(0).ok());
        EXPECT_TRUE(machine_->HostAccess(first.src, 1, /*write=*/true).ok());
        const_cast<uint8_t*>(src)[0] ^= 0x10;
        break;
      }
      case Fault::kSwappedElements:
        wrong.push_back({dst + 4, src, 4});
        wrong.push_back({dst + 8, src + 8, first.size_bytes - 8});
        wrong.front() = {dst, src + 4, 4};
        break;
      case Fault::kShiftedByOne:
        wrong.push_back({dst + first.size_bytes - 1, src, 1});
        wrong.front() = {dst, src + 1, first.size_bytes - 1};
        break;
      case Fault::kDropped:
        return absl::OkStatus();
    }
    return ForwardingDevice::CopyAsync(direction, wrong, stream);
  }

 private:
  const std::shared_ptr<EmulatedMachine> machine_;
  const Fault fault_;
};

std::shared_ptr<OffloadSession> SessionOn(EmuWorld& world, Fault fault, OffloadOptions options) {
  auto device = std::make_shared<FaultyDevice>(
      std::shared_ptr<EmulatedMachine>(std::shared_ptr<void>(), &world.machine()), fault);
  return OffloadSession::Create(options, OwnBackend([device](int) { return device; })).value();
}

// Saves one tensor of [32, 48] floats, which is offloaded, and reads it in backward.
void ReadBack(EmuWorld& world, const std::shared_ptr<OffloadSession>& session,
              std::vector<at::Tensor>* seen) {
  const at::Tensor carrier = NewCarrier(world);
  std::vector<at::Tensor> others;
  const at::Tensor y = InScope(session, carrier, [&](at::Tensor& y) {
    y = Observe(y, {Activation(carrier, {32, 48}, 1)}, seen);
    y = Observe(y, {Activation(carrier, {64, 64}, 2)}, &others);
  });
  y.backward();
}

class OffloadVerifyFaults : public ::testing::TestWithParam<Fault> {};

TEST_P(OffloadVerifyFaults, AreFoundAndNameTheTensorAndItsTransfers) {
  EmuWorld world;
  const std::shared_ptr<OffloadSession> session = SessionOn(world, GetParam(), Verifying(1));
  std::vector<at::Tensor> seen;
  EXPECT_THAT(ErrorOf([&] { ReadBack(world, session, &seen); }),
              AllOf(HasSubstr("verify mode"), HasSubstr("Float ["), HasSubstr(" bytes"),
                    HasSubstr("D2H "), HasSubstr("H2D "), HasSubstr("checksum was")));
  EXPECT_TRUE(Soon([&] { return session->GetStats().live_handles == 0; }));
}

TEST_P(OffloadVerifyFaults, AreNotFoundWithoutVerifyMode) {
  EmuWorld world;
  const std::shared_ptr<OffloadSession> session = SessionOn(world, GetParam(), SmallWindows(1));
  std::vector<at::Tensor> seen;
  ReadBack(world, session, &seen);
  EXPECT_FALSE(SameBytes(seen.at(0).cpu(), ActivationValues({32, 48}, 1)));
  EXPECT_TRUE(Soon([&] { return session->GetStats().live_handles == 0; }));
  EXPECT_EQ(session->GetStats().verified, 0u);
}

INSTANTIATE_TEST_SUITE_P(Faults, OffloadVerifyFaults,
                         ::testing::Values(Fault::kFlippedBit, Fault::kSwappedElements,
                                           Fault::kShiftedByOne, Fault::kDropped));

class OffloadVerifyParity
    : public ::testing::TestWithParam<std::tuple<EffectSchedule, c10::ScalarType, bool>> {};

TEST_P(OffloadVerifyParity, RightBytesAreLetThroughAndGiveTheSameGradients) {
  const auto [schedule, dtype, overlap] = GetParam();
  OffloadOptions options = Verifying(4 * kKiB);
  options.overlap = overlap;
  NetShape shape;
  shape.tokens = 11;  // odd sizes
  Gradients plain;
  {
    EmuWorld world(MachineOptions(schedule), options);
    const TestNet net(world.device(), dtype, shape);
    plain = TrainStep(net, nullptr);
  }
  EmuWorld world(MachineOptions(schedule), options);
  const TestNet net(world.device(), dtype, shape);
  for (int step = 0; step < 2; ++step) {
    ExpectSameGradients(plain, TrainStep(net, world.session()));
  }
  const OffloadStats stats = world.QuietStats();
  EXPECT_GT(stats.evicted_bytes, 0u);
  EXPECT_GT(stats.fetched_bytes, 0u);
  EXPECT_GT(stats.verified, 10u);
  EXPECT_GT(stats.shared, 0u) << "views of one copy are verified, too";
}

INSTANTIATE_TEST_SUITE_P(
    Modes, OffloadVerifyParity,
    ::testing::Combine(::testing::Values(EffectSchedule::kLate, EffectSchedule::kRandom),
                       ::testing::Values(at::kFloat, at::kBFloat16), ::testing::Bool()));

TEST(OffloadVerify, ViewsOfAPartOfAStorageAreVerifiedWhereTheyLie) {
  EmuWorld world(MachineOptions(), Verifying(1));
  const at::Tensor carrier = NewCarrier(world);
  std::vector<at::Tensor> seen, others;
  InScope(world.session(), carrier, [&](at::Tensor& y) {
    // 333 odd elements in the middle of a storage more than twice as large.
    const at::Tensor whole = Activation(carrier, {2000}, 1);
    y = Observe(y, {whole.narrow(0, 777, 333)}, &seen);
    y = Observe(y, {Activation(carrier, {64, 64}, 2)}, &others);
  }).backward();
  EXPECT_EQ(world.QuietStats().verified, 2u);
}

TEST(OffloadVerify, TheEnvironmentSwitchesItOn) {
  setenv("PINION_VERIFY", "1", 1);
  EmuWorld world;
  unsetenv("PINION_VERIFY");
  EXPECT_TRUE(world.session()->options().verify);
  EXPECT_FALSE(world.NewSession(SmallWindows())->options().verify);
}

}  // namespace
}  // namespace pinion::testing
