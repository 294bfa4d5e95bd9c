#include "pinion/engine/link/link_meter.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::HasSubstr;

// A device whose next copy can be delayed on the host.
class HesitantDevice : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  int copies = 0;
  EventHandle event;  // spends virtual host time, 1 us per query
  int next_copy_us = 0;

  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    ++copies;
    if (copies > 2) {  // once the gate runs
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

  // Returns how many copies a sample of four small ones took, including gates and repetitions.
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

// CUDA loads modules lazily, so a process's first copies take milliseconds on the host.
TEST_F(LinkMeterTest, AHostThatWasHeldUpOnceDoesNotMakeGatesLongForGood) {
  (void)CopiesOfOneSample();
  const int usual = CopiesOfOneSample();
  device_->next_copy_us = 5000;
  EXPECT_GT(CopiesOfOneSample(), usual);
  int later = 0;
  for (int i = 0; i < 100; ++i) later = CopiesOfOneSample();
  EXPECT_LE(later, 2 * usual + 4);
}

// --- Submissions on a link so slow that every gate holds ---

// Logs a meter's calls: R record, W stream wait, Q query, H host wait, E elapsed, C a copy to the
// device, t a copy to the host.
class LoggingDevice : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  std::string log;
  std::vector<CopyPiece> to_host;
  int queries = 0;
  std::function<bool(int query)> lies;  // whether a query, counted from 1, wrongly returns "done"

  absl::Status RecordEvent(EventHandle event, StreamHandle stream) override {
    log += 'R';
    return ForwardingDevice::RecordEvent(event, stream);
  }
  absl::Status StreamWaitEvent(StreamHandle stream, EventHandle event) override {
    log += 'W';
    return ForwardingDevice::StreamWaitEvent(stream, event);
  }
  absl::StatusOr<bool> QueryEvent(EventHandle event) override {
    log += 'Q';
    if (++queries; lies && lies(queries)) return true;
    return ForwardingDevice::QueryEvent(event);
  }
  absl::Status WaitEvent(EventHandle event, absl::Duration timeout) override {
    log += 'H';
    return ForwardingDevice::WaitEvent(event, timeout);
  }
  absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle end) override {
    log += 'E';
    return ForwardingDevice::ElapsedMs(start, end);
  }
  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    const bool out = direction == CopyDirection::kDeviceToHost;
    log += out ? 't' : 'C';
    if (out) to_host.push_back(pieces[0]);
    return ForwardingDevice::CopyAsync(direction, pieces, stream);
  }
};

class LinkMeterProtocolTest : public ::testing::Test {
 protected:
  static EmulatedOptions SlowLink() {
    EmulatedOptions options;
    options.memory_bytes = 64 * kMiB;
    LinkModel& link = options.preset.link;
    link.h2d_gb_per_s = link.d2h_gb_per_s = 1;
    link.h2d_duplex_gb_per_s = link.d2h_duplex_gb_per_s = 1;
    return options;
  }

  void SetUp() override {
    host_ = device_.pinned_source()->Allocate(4 * kMiB).value();
    all_ = {host_.data, device_.Allocate(4 * kMiB, meter_->stream()).value(), 4 * kMiB};
    meter_->SetGate(all_.Part(0, kMiB));
  }
  void TearDown() override {
    ASSERT_THAT(meter_->Settle(), IsOk());
    ASSERT_THAT(device_.Free(all_.device, meter_->stream()), IsOk());
    meter_.reset();
    EXPECT_EQ(device_.live_events() + device_.live_streams(), 0);
    ASSERT_THAT(device_.pinned_source()->Free(host_), IsOk());
  }

  LinkBuffer traffic() const { return all_.Part(3 * kMiB, kMiB); }
  LinkLoad Load(int copies, uint64_t piece_bytes) const {
    LinkLoad load;
    load.pieces.assign(copies, all_.Part(kMiB, piece_bytes).Piece(CopyDirection::kHostToDevice));
    return load;
  }
  std::string CallsOf(const LinkLoad& load) {
    device_.log.clear();
    device_.queries = 0;
    device_.to_host.clear();
    EXPECT_THAT(meter_->MeasureUs(load), IsOk());
    return device_.log;
  }
  static std::string Times(int count, const std::string& text) {
    std::string all;
    for (int i = 0; i < count; ++i) all += text;
    return all;
  }
  // Gate, load, queries and Settle.
  static std::string Alone(int gate_copies, int copies) {
    return Times(gate_copies - 1, "C") + "RCR" + "R" + Times(copies, "C") + "R" + "QH" + "RH" + "E";
  }
  static std::string BesideTraffic(int gate_copies, int copies, int rounds) {
    return Times(gate_copies - 1, "C") + "RCR" + "WW" + Times(rounds, "tt") + "RR" + "R" +
           Times(copies, "C") + "R" + "QHQQ" + "RRRHHH" + "E";
  }

  const std::shared_ptr<EmulatedMachine> machine_ = EmulatedMachine::Create(SlowLink()).value();
  LoggingDevice device_{machine_->device(0)};
  std::unique_ptr<LinkMeter> meter_ = LinkMeter::Create(device_).value();
  HostSegment host_;
  LinkBuffer all_;
};

// One gate copy for 16 submissions: the copies and four events.
TEST_F(LinkMeterProtocolTest, AGateGrowsWithTheSubmissionsThatItMustOutlast) {
  EXPECT_EQ(CallsOf(Load(12, 4 * kKiB)), Alone(1, 12));
  EXPECT_EQ(CallsOf(Load(13, 4 * kKiB)), Alone(2, 13));
}

// Rounds of 1 MiB cover 1.25 times the gate copy, 1 MiB per fixed cost, and the load. One is added.
TEST_F(LinkMeterProtocolTest, TrafficGrowsWithTheBytesThatItMustOutlast) {
  ASSERT_THAT(meter_->AddTraffic(device_, CopyDirection::kDeviceToHost, traffic()), IsOk());
  EXPECT_EQ(CallsOf(Load(4, 512 * kKiB)), BesideTraffic(2, 4, 10));
  EXPECT_EQ(CallsOf(Load(5, 160 * kKiB)), BesideTraffic(3, 5, 10));
  ASSERT_THAT(meter_->ClearTraffic(), IsOk());
  EXPECT_EQ(CallsOf(Load(12, 4 * kKiB)), Alone(1, 12));
}

TEST_F(LinkMeterProtocolTest, TrafficThatIsStillUnderWayIsWaitedForBeforeItsStreamsGo) {
  ASSERT_THAT(meter_->AddTraffic(device_, CopyDirection::kDeviceToHost, traffic()), IsOk());
  // Shared, because the device outlives this function.
  const auto failing = std::make_shared<std::string>("QueryEvent");
  device_.FailCalls([failing](const std::string& call, uint64_t) {
    return call == *failing ? absl::UnavailableError("injected") : absl::OkStatus();
  });
  ASSERT_FALSE(meter_->MeasureUs(Load(4, 512 * kKiB)).ok());
  *failing = "WaitEvent";
  EXPECT_FALSE(meter_->ClearTraffic().ok());
  EXPECT_EQ(device_.live_streams(), 3) << "its own and two of traffic";
  failing->clear();
  device_.log.clear();
  EXPECT_THAT(meter_->ClearTraffic(), IsOk());
  EXPECT_EQ(device_.log, "RRRHHH");
  EXPECT_EQ(device_.live_streams(), 1);
}

TEST_F(LinkMeterProtocolTest, ItsTwoStreamsOfTrafficAreHalfACopyApart) {
  ASSERT_THAT(meter_->AddTraffic(device_, CopyDirection::kDeviceToHost, traffic()), IsOk());
  CallsOf(Load(4, 512 * kKiB));
  ASSERT_EQ(device_.to_host.size(), 20u);
  char* const begin = static_cast<char*>(traffic().host);
  const uint64_t half = kMiB / 2;
  for (size_t i = 0; i < device_.to_host.size(); ++i) {
    EXPECT_EQ(device_.to_host[i].dst, begin + (i % 2) * half) << i;
    EXPECT_EQ(device_.to_host[i].size_bytes, i == 1 ? half / 2 : half) << i;
  }
}

TEST_F(LinkMeterProtocolTest, WhatWasOverTooEarlyGrowsAndIsForgotten) {
  ASSERT_THAT(meter_->AddTraffic(device_, CopyDirection::kDeviceToHost, traffic()), IsOk());
  const LinkLoad load = Load(4, 512 * kKiB);
  const std::string usual = BesideTraffic(2, 4, 10);
  device_.lies = [](int query) { return query == 1; };  // the gate's query
  EXPECT_EQ(CallsOf(load), usual + BesideTraffic(4, 4, 10));
  device_.lies = nullptr;
  for (int i = 0; i < 20; ++i) CallsOf(load);
  EXPECT_EQ(CallsOf(load), usual);
  for (const int lane : {2, 3}) {
    device_.lies = [lane](int query) { return query == lane; };
    EXPECT_EQ(CallsOf(load), usual + BesideTraffic(3, 4, 15)) << lane;
    device_.lies = nullptr;
    EXPECT_EQ(CallsOf(load), BesideTraffic(3, 4, 14)) << "5 % are forgotten at a time";
    for (int i = 0; i < 20; ++i) CallsOf(load);
    EXPECT_EQ(CallsOf(load), usual);
  }
}

TEST_F(LinkMeterProtocolTest, TrafficThatCannotLastIsAnErrorThatSaysSo) {
  ASSERT_THAT(
      meter_->AddTraffic(device_, CopyDirection::kDeviceToHost, all_.Part(3 * kMiB, 8 * kKiB)),
      IsOk());
  device_.lies = [](int query) { return query % 3 == 2; };
  EXPECT_THAT(meter_->MeasureUs(Load(1, 4 * kKiB)),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("a larger buffer")));
}

TEST_F(LinkMeterProtocolTest, ATimeIsThatOfOneCopy) {
  const double expected_us = kMiB * 1e-3;
  EXPECT_NEAR(meter_->MeasureUs(Load(4, kMiB)).value(), expected_us, 0.01 * expected_us);
  EXPECT_NEAR(meter_->MeasureUngatedUs(Load(4, kMiB)).value(), expected_us, 0.02 * expected_us);
}

TEST_F(LinkMeterProtocolTest, WhateverFailsIsReturned) {
  const LinkLoad load = Load(2, 4 * kKiB);
  for (const bool gated : {true, false}) {
    const auto measure = [&] {
      return gated ? meter_->MeasureUs(load) : meter_->MeasureUngatedUs(load);
    };
    const uint64_t before = device_.calls();
    ASSERT_THAT(measure(), IsOk());
    const uint64_t calls = device_.calls() - before;
    for (uint64_t k = 1; k <= calls; ++k) {
      const uint64_t fail_at = device_.calls() + k;
      device_.FailCalls([fail_at](const std::string&, uint64_t number) {
        return number == fail_at ? absl::UnavailableError("injected") : absl::OkStatus();
      });
      EXPECT_THAT(measure(), StatusIs(absl::StatusCode::kUnavailable)) << "call " << k;
      device_.FailCalls(nullptr);
    }
  }
}

using LinkMeterDeathTest = LinkMeterTest;

TEST_F(LinkMeterDeathTest, LoadsAndBuffersThatMakeNoSenseAreTheCallersBug) {
  EXPECT_DEATH((void)buffer_.Part(1, kBytes), "bytes at 1 of");
  EXPECT_DEATH(
      meter_->AddTraffic(*device_, CopyDirection::kDeviceToHost, buffer_.Part(0, 3)).IgnoreError(),
      "traffic needs a larger buffer than 3 bytes");
  LinkLoad load;
  EXPECT_DEATH((void)meter_->MeasureUngatedUs(load), "0 pieces cannot go 1 at a time");
  load.pieces.assign(3, buffer_.Part(0, 4 * kKiB).Piece(load.direction));
  load.pieces_per_copy = 2;
  EXPECT_DEATH((void)meter_->MeasureUngatedUs(load), "3 pieces cannot go 2 at a time");
  load.pieces_per_copy = 0;
  EXPECT_DEATH((void)meter_->MeasureUs(load), "copies of no pieces");
  load.pieces_per_copy = 1;
  const std::unique_ptr<LinkMeter> without_gate = LinkMeter::Create(*device_).value();
  EXPECT_DEATH((void)without_gate->MeasureUs(load), "without SetGate");
}

TEST_F(LinkMeterTest, AMeterWithoutWorkIsSettled) { EXPECT_THAT(meter_->Settle(), IsOk()); }

}  // namespace
}  // namespace pinion::testing
