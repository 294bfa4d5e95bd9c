#include "pinion/engine/link/link_meter.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {
namespace {

// Far longer than any of these copies takes: a stuck stream becomes an error instead of a hang.
constexpr absl::Duration kPatience = absl::Minutes(1);

// The driver's queue has about 1000 entries. A longer gate would block the host, and end before
// everything is submitted.
constexpr int kMaxGateCopies = 512;
// Several times the need of the longest copy that fits a device.
constexpr int kMaxTrafficCopies = 1 << 10;

// One delay of the host must not make all later samples long. Costs one sample in fourteen.
constexpr double kForget = 0.95;

// First guess for links of any speed: bytes that the link moves in the fixed cost of a copy.
constexpr uint64_t kFixedCostBytes = kMiB;

constexpr double kUsPerMs = 1e3;

void LogIfBad(const absl::Status& status, const char* what) {
  if (!status.ok()) PINION_LOG(kWarning) << "link meter: " << what << ": " << status.message();
}

absl::Status CopyOne(Device& device, CopyDirection direction, const CopyPiece& piece,
                     StreamHandle stream) {
  return device.CopyAsync(direction, {&piece, 1}, stream);
}

}  // namespace

LinkBuffer LinkBuffer::Part(uint64_t offset_bytes, uint64_t part_bytes) const {
  PINION_CHECK(part_bytes <= size_bytes && offset_bytes <= size_bytes - part_bytes)
      << part_bytes << " bytes at " << offset_bytes << " of " << size_bytes;
  return {static_cast<char*>(host) + offset_bytes, static_cast<char*>(device) + offset_bytes,
          part_bytes};
}

CopyPiece LinkBuffer::Piece(CopyDirection direction) const {
  return direction == CopyDirection::kHostToDevice ? CopyPiece{device, host, size_bytes}
                                                   : CopyPiece{host, device, size_bytes};
}

absl::StatusOr<std::unique_ptr<LinkMeter>> LinkMeter::Create(Device& device) {
  std::unique_ptr<LinkMeter> meter(new LinkMeter(device));
  PINION_ASSIGN_OR_RETURN(meter->stream_, device.CreateStream("link meter"));
  PINION_ASSIGN_OR_RETURN(meter->traffic_may_start_, device.CreateEvent());
  PINION_ASSIGN_OR_RETURN(meter->gate_, device.CreateEvent());
  PINION_ASSIGN_OR_RETURN(meter->start_, device.CreateTimedEvent());
  PINION_ASSIGN_OR_RETURN(meter->end_, device.CreateTimedEvent());
  return meter;
}

LinkMeter::~LinkMeter() {
  for (const Lane& lane : lanes_) Destroy(lane);
  for (const EventHandle event : {traffic_may_start_, gate_, start_, end_}) {
    if (event.valid()) LogIfBad(device_.DestroyEvent(event), "an event leaks");
  }
  if (stream_.valid()) LogIfBad(device_.DestroyStream(stream_), "a stream leaks");
}

absl::Status LinkMeter::AddTraffic(Device& device, CopyDirection direction,
                                   const LinkBuffer& buffer) {
  const uint64_t half = buffer.size_bytes / 2;
  PINION_CHECK(half >= 2) << "traffic needs a larger buffer than " << buffer.size_bytes << " bytes";
  for (const uint64_t first_bytes : {half, half / 2}) {
    Lane lane;
    lane.device = &device;
    lane.direction = direction;
    lane.piece = buffer.Part(first_bytes == half ? 0 : half, half).Piece(direction);
    lane.first_bytes = first_bytes;
    PINION_ASSIGN_OR_RETURN(lane.stream, device.CreateStream("link meter traffic"));
    const absl::StatusOr<EventHandle> end = device.CreateEvent();
    if (!end.ok()) {
      Destroy(lane);
      return end.status();
    }
    lane.end = *end;
    lanes_.push_back(lane);
  }
  return absl::OkStatus();
}

void LinkMeter::Destroy(const Lane& lane) {
  if (lane.end.valid()) LogIfBad(lane.device->DestroyEvent(lane.end), "an event leaks");
  LogIfBad(lane.device->DestroyStream(lane.stream), "a stream leaks");
}

absl::Status LinkMeter::ClearTraffic() {
  PINION_RETURN_IF_ERROR(Settle());
  for (const Lane& lane : lanes_) Destroy(lane);
  lanes_.clear();
  return absl::OkStatus();
}

absl::StatusOr<double> LinkMeter::MeasureUs(const LinkLoad& load) {
  PINION_CHECK(load.pieces_per_copy >= 1) << "copies of no pieces";
  PINION_CHECK(gate_buffer_.size_bytes > 0) << "MeasureUs without SetGate";
  while (true) {
    PINION_ASSIGN_OR_RETURN(const Sample sample, Take(load));
    if (sample.gate_held && sample.traffic_lasted) {
      gate_copies_per_submission_ = std::max(kLeastGate, kForget * gate_copies_per_submission_);
      traffic_bytes_per_byte_ = std::max(kLeastTraffic, kForget * traffic_bytes_per_byte_);
      return sample.us;
    }
    if (!sample.gate_held) {
      if (GateCopies(load) == kMaxGateCopies) {
        return absl::FailedPreconditionError(absl::StrCat(
            device_.name(), ": ", kMaxGateCopies, " copies of ",
            HumanBytes(gate_buffer_.size_bytes), " were over before ", load.copies(),
            " more could be submitted, so they cannot be timed apart from the host: use a larger "
            "gate or fewer copies"));
      }
      gate_copies_per_submission_ *= 2;
    }
    if (!sample.traffic_lasted) {
      if (TrafficCopies(load) == kMaxTrafficCopies) {
        return absl::FailedPreconditionError(
            absl::StrCat(device_.name(), ": ", kMaxTrafficCopies, " copies of ",
                         HumanBytes(lanes_.front().piece.size_bytes),
                         " were over before the copies that they should run beside: give the "
                         "traffic a larger buffer"));
      }
      traffic_bytes_per_byte_ *= 1.5;
    }
  }
}

int LinkMeter::TrafficCopies(const LinkLoad& load) const {
  if (lanes_.empty()) return 0;
  // The last gate copy, and the fixed costs of the load as if they were bytes.
  uint64_t beside_bytes = gate_buffer_.size_bytes + kFixedCostBytes * load.copies();
  for (const CopyPiece& piece : load.pieces) beside_bytes += piece.size_bytes;
  const double round_bytes = 2 * static_cast<double>(lanes_.front().piece.size_bytes);
  const double copies =
      std::ceil(traffic_bytes_per_byte_ * static_cast<double>(beside_bytes) / round_bytes);
  return static_cast<int>(std::min<double>(copies + 1, kMaxTrafficCopies));
}

int LinkMeter::GateCopies(const LinkLoad& load) const {
  // Includes events: two for each lane, and four more.
  const double submissions =
      load.copies() + 4.0 + static_cast<double>(lanes_.size()) * (TrafficCopies(load) + 2);
  const double copies = std::ceil(gate_copies_per_submission_ * submissions);
  return static_cast<int>(std::min<double>(copies, kMaxGateCopies));
}

absl::StatusOr<LinkMeter::Sample> LinkMeter::Take(const LinkLoad& load) {
  const CopyPiece gate = gate_buffer_.Piece(load.direction);
  const int gate_copies = GateCopies(load);
  for (int i = 1; i < gate_copies; ++i) {
    PINION_RETURN_IF_ERROR(CopyOne(device_, load.direction, gate, stream_));
  }
  PINION_RETURN_IF_ERROR(device_.RecordEvent(traffic_may_start_, stream_));
  PINION_RETURN_IF_ERROR(CopyOne(device_, load.direction, gate, stream_));
  PINION_RETURN_IF_ERROR(device_.RecordEvent(gate_, stream_));
  PINION_RETURN_IF_ERROR(SubmitTraffic(TrafficCopies(load)));
  PINION_RETURN_IF_ERROR(SubmitLoad(load));
  Sample sample;
  PINION_ASSIGN_OR_RETURN(const bool gate_over, device_.QueryEvent(gate_));
  sample.gate_held = !gate_over;
  PINION_RETURN_IF_ERROR(device_.WaitEvent(end_, kPatience));
  sample.traffic_lasted = true;
  for (const Lane& lane : lanes_) {
    PINION_ASSIGN_OR_RETURN(const bool over, lane.device->QueryEvent(lane.end));
    if (over) sample.traffic_lasted = false;
  }
  PINION_RETURN_IF_ERROR(Settle());
  PINION_ASSIGN_OR_RETURN(const double ms, device_.ElapsedMs(start_, end_));
  sample.us = ms * kUsPerMs / load.copies();
  return sample;
}

absl::Status LinkMeter::SubmitTraffic(int copies) {
  for (const Lane& lane : lanes_) {
    PINION_RETURN_IF_ERROR(lane.device->StreamWaitEvent(lane.stream, traffic_may_start_));
  }
  for (int i = 0; i < copies; ++i) {
    for (const Lane& lane : lanes_) {
      CopyPiece piece = lane.piece;
      if (i == 0) piece.size_bytes = lane.first_bytes;
      PINION_RETURN_IF_ERROR(CopyOne(*lane.device, lane.direction, piece, lane.stream));
    }
  }
  for (const Lane& lane : lanes_) {
    PINION_RETURN_IF_ERROR(lane.device->RecordEvent(lane.end, lane.stream));
  }
  return absl::OkStatus();
}

absl::Status LinkMeter::SubmitLoad(const LinkLoad& load) {
  const size_t per_copy = static_cast<size_t>(load.pieces_per_copy);
  PINION_CHECK(load.copies() >= 1 && load.pieces.size() % per_copy == 0)
      << load.pieces.size() << " pieces cannot go " << per_copy << " at a time";
  PINION_RETURN_IF_ERROR(device_.RecordEvent(start_, stream_));
  const absl::Span<const CopyPiece> pieces = load.pieces;
  for (size_t first = 0; first < pieces.size(); first += per_copy) {
    PINION_RETURN_IF_ERROR(
        device_.CopyAsync(load.direction, pieces.subspan(first, per_copy), stream_));
  }
  return device_.RecordEvent(end_, stream_);
}

absl::StatusOr<double> LinkMeter::MeasureUngatedUs(const LinkLoad& load) {
  PINION_RETURN_IF_ERROR(SubmitLoad(load));
  PINION_RETURN_IF_ERROR(Settle());
  PINION_ASSIGN_OR_RETURN(const double ms, device_.ElapsedMs(start_, end_));
  return ms * kUsPerMs / load.copies();
}

absl::Status LinkMeter::Settle() {
  // A submission that failed half-way has recorded no event behind it, so record new ones. The
  // timed events stay as they are.
  PINION_RETURN_IF_ERROR(device_.RecordEvent(gate_, stream_));
  for (const Lane& lane : lanes_) {
    PINION_RETURN_IF_ERROR(lane.device->RecordEvent(lane.end, lane.stream));
  }
  for (const Lane& lane : lanes_) {
    PINION_RETURN_IF_ERROR(lane.device->WaitEvent(lane.end, kPatience));
  }
  return device_.WaitEvent(gate_, kPatience);
}

}  // namespace pinion
