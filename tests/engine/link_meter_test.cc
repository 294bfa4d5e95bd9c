#include "pinion/engine/link_meter.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using testing::ForwardingDevice;
using testing::IsOk;

// A host that can be held up before a copy.
class HesitantDevice : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  int copies = 0;
  EventHandle event;  // to spend the host's virtual time on, 1 us per query
  int next_copy_us = 0;

  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    ++copies;
    if (copies > 2) {  // once the gate is under way
      for (; next_copy_us > 0; --next_copy_us) (void)ForwardingDevice::QueryEvent(event);
    }
    return ForwardingDevice::CopyAsync(direction, pieces, stream);
  }
};

class LinkMeterTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kBytes = kMiB;

  void SetUp() override {
    machine_ = EmulatedMachine::Create({}).value();
    device_ = std::make_unique<HesitantDevice>(machine_->device(0));
    device_->event = device_->CreateEvent().value();
    meter_ = LinkMeter::Create(*device_).value();
    host_ = device_->pinned_source()->Allocate(AlignUp(kBytes, 2 * kMiB)).value();
    buffer_ = {host_.data, device_->Allocate(kBytes, meter_->stream()).value(), kBytes};
    meter_->SetGate(buffer_);
  }

  void TearDown() override {
    ASSERT_THAT(meter_->Settle(), IsOk());
    ASSERT_THAT(device_->Free(buffer_.device, meter_->stream()), IsOk());
    ASSERT_THAT(device_->pinned_source()->Free(host_), IsOk());
  }

  // How many copies a sample of four small ones took, gates and repeats included.
  int CopiesOfOneSample() {
    LinkLoad load;
    load.pieces.assign(4, buffer_.Part(0, 4 * kKiB).Piece(load.direction));
    device_->copies = 0;
    EXPECT_THAT(meter_->MeasureUs(load), IsOk());
    return device_->copies;
  }

  std::shared_ptr<EmulatedMachine> machine_;
  std::unique_ptr<HesitantDevice> device_;
  std::unique_ptr<LinkMeter> meter_;
  HostSegment host_;
  LinkBuffer buffer_;
};

// CUDA loads its modules lazily: the first copies of a process take the host milliseconds.
TEST_F(LinkMeterTest, AHostThatWasHeldUpOnceDoesNotMakeGatesLongForGood) {
  (void)CopiesOfOneSample();
  const int usual = CopiesOfOneSample();
  device_->next_copy_us = 5000;
  EXPECT_GT(CopiesOfOneSample(), usual);
  int later = 0;
  for (int i = 0; i < 100; ++i) later = CopiesOfOneSample();
  EXPECT_LE(later, 2 * usual + 4);
}

TEST_F(LinkMeterTest, AMeterWithoutWorkIsSettled) { EXPECT_THAT(meter_->Settle(), IsOk()); }

}  // namespace
}  // namespace pinion
