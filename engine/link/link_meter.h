// Times copies on a link, and the link alone: not the host that submits them.
//
//   PINION_ASSIGN_OR_RETURN(const std::unique_ptr<LinkMeter> meter, LinkMeter::Create(*device));
//   meter->SetGate(gate_buffer);
//   PINION_ASSIGN_OR_RETURN(const double us, meter->MeasureUs({direction, pieces}));
//   ...
//   PINION_RETURN_IF_ERROR(meter->Settle());  // before any of the memory goes
//
// The link moves a small copy faster than the host can submit the next one, so the measured copies
// are held back behind a gate, large copies on the same stream, until all of them are queued:
//
//   measured   | gate copy | gate copy |G|S| copy | copy | copy |E|
//   traffic                |  copies of other directions or devices ...    |T
//   host       submits it all, then asks: is G still not done?         then: is T still not done?
//
// The result is the time from S to E by the device's clock. If G was done too early, the gate is
// doubled and the sample repeated; if the traffic ended before E, the traffic is. Traffic begins
// with the last gate copy, so it is in full swing at S; it takes turns on two streams, so that the
// fixed cost of one stream's copy passes while the other one's bytes move. No kernel is needed.
//
// Errors: FailedPrecondition when submission is so slow that no gate of bearable length holds; the
// device's own errors; DeadlineExceeded when a copy takes longer than a minute.
// Thread safety: one thread at a time. Ownership: memory and devices are the caller's; both must
// stay until Settle has returned OkStatus after the last measurement. Where it fails, the memory
// must stay for good: the end of the meter stops no copy.

#ifndef PINION_ENGINE_LINK_LINK_METER_H_
#define PINION_ENGINE_LINK_LINK_METER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/device/device.h"

namespace pinion {

// Two places of the same size, one on each side of the link.
struct LinkBuffer {
  void* host = nullptr;
  void* device = nullptr;
  uint64_t size_bytes = 0;

  LinkBuffer Part(uint64_t offset_bytes, uint64_t part_bytes) const;
  CopyPiece Piece(CopyDirection direction) const;
};

// Copies that are submitted one behind the other: one CopyAsync for every `pieces_per_copy` pieces,
// of which there is a whole number. The pieces of one submission must not overlap.
struct LinkLoad {
  CopyDirection direction = CopyDirection::kHostToDevice;
  std::vector<CopyPiece> pieces;
  int pieces_per_copy = 1;

  int copies() const { return static_cast<int>(pieces.size()) / pieces_per_copy; }
};

class LinkMeter {
 public:
  static absl::StatusOr<std::unique_ptr<LinkMeter>> Create(Device& device);
  ~LinkMeter();
  LinkMeter(const LinkMeter&) = delete;
  LinkMeter& operator=(const LinkMeter&) = delete;

  // The stream of the measured copies. Device memory for them is best allocated on it.
  StreamHandle stream() const { return stream_; }

  // The gate's copies go from one end of `buffer` to the other, in the measured direction. 8 MiB
  // or more make a gate of few copies. Pinned memory; it may be that of the load.
  void SetGate(const LinkBuffer& buffer) { gate_buffer_ = buffer; }

  // From now on, copies between the ends of `buffer` run beside what is measured. The buffer is
  // pinned, touched by nobody else meanwhile, and ready for use on any stream of `device`.
  absl::Status AddTraffic(Device& device, CopyDirection direction, const LinkBuffer& buffer);
  // Waits for the copies that were submitted. If that fails the traffic stays, for Settle to see.
  absl::Status ClearTraffic();

  // Microseconds per submission of `load`, on average. The load's memory must be pinned.
  absl::StatusOr<double> MeasureUs(const LinkLoad& load);

  // The same without gate and traffic, for pageable memory: its copies block the host, and so a
  // part of what the host does is in the result, as it is in every program that uses them.
  absl::StatusOr<double> MeasureUngatedUs(const LinkLoad& load);

  // OkStatus when nothing that was submitted here can still touch memory.
  absl::Status Settle();

 private:
  // One stream of traffic.
  struct Lane {
    Device* device = nullptr;
    CopyDirection direction = CopyDirection::kHostToDevice;
    CopyPiece piece;
    uint64_t first_bytes = 0;  // of the first copy, which sets the lanes apart
    StreamHandle stream;
    EventHandle end;
  };
  struct Sample {
    bool gate_held = false;
    bool traffic_lasted = false;
    double us = 0;
  };

  explicit LinkMeter(Device& device) : device_(device) {}

  absl::Status Init();
  absl::Status AddLane(Lane lane);
  int GateCopies(const LinkLoad& load) const;
  int TrafficCopies(const LinkLoad& load) const;  // per lane
  absl::Status SubmitTraffic(int copies);
  absl::Status SubmitLoad(const LinkLoad& load);
  absl::StatusOr<Sample> Take(const LinkLoad& load);
  static void Destroy(const Lane& lane);

  Device& device_;
  StreamHandle stream_;
  EventHandle traffic_may_start_;
  EventHandle gate_;
  EventHandle start_;
  EventHandle end_;
  LinkBuffer gate_buffer_;
  std::vector<Lane> lanes_;
  // What was enough of late, as rates, so that a large load does not have to learn what small ones
  // taught.
  static constexpr double kLeastGate = 1.0 / 16;
  static constexpr double kLeastTraffic = 1.25;  // some more, until the host has seen the end
  double gate_copies_per_submission_ = kLeastGate;
  double traffic_bytes_per_byte_ = kLeastTraffic;  // of one direction or device
};

}  // namespace pinion

#endif  // PINION_ENGINE_LINK_LINK_METER_H_
