// Times copies on a link, without the host's cost of submitting them.
//
//   PINION_ASSIGN_OR_RETURN(const std::unique_ptr<LinkMeter> meter, LinkMeter::Create(*device));
//   meter->SetGate(gate_buffer);
//   PINION_ASSIGN_OR_RETURN(const double us, meter->MeasureUs({direction, pieces}));
//   ...
//   PINION_RETURN_IF_ERROR(meter->Settle());  // before the memory is freed
//
// A link moves small copies faster than the host submits them. So the measured copies wait behind a
// gate, large copies on the same stream, until all of them are queued:
//
//   measured   | gate copy | gate copy |G|S| copy | copy | copy |E|
//   traffic                |  copies of other directions or devices ...    |T
//   host       submits everything, then asks: is G pending?            then: is T pending?
//
// The result is the device's time from S to E. If G completed too early, the meter doubles the gate
// and repeats the sample. If the traffic ended before E, it lengthens the traffic. Traffic starts
// with the last gate copy, so it is running at S. It alternates between two streams, so that one
// stream's bytes cover the other's fixed cost. No kernel is needed.
//
// Errors: FailedPrecondition if submission is too slow for a gate of acceptable length.
// DeadlineExceeded if a copy takes longer than a minute. The device's own errors.
// Thread safety: one thread at a time.
// Ownership: the caller owns memory and devices. Both must live until Settle has returned OkStatus
// after the last measurement. If Settle fails, never free the memory: the destructor stops no copy.

#ifndef PINION_ENGINE_LINK_LINK_METER_H_
#define PINION_ENGINE_LINK_LINK_METER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/device/device.h"

namespace pinion {

// Two buffers of one size, one at each end of the link.
struct LinkBuffer {
  void* host = nullptr;
  void* device = nullptr;
  uint64_t size_bytes = 0;

  LinkBuffer Part(uint64_t offset_bytes, uint64_t part_bytes) const;
  CopyPiece Piece(CopyDirection direction) const;
};

// Copies submitted one after another: one CopyAsync per `pieces_per_copy` pieces, which divides the
// number of pieces. The pieces of one submission must not overlap.
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

  // Returns the stream of the measured copies. Allocate device memory for them on this stream.
  StreamHandle stream() const { return stream_; }

  // Sets the pinned buffer of the gate's copies, which go in the measured direction. With 8 MiB
  // or more a few copies suffice. The load may share the buffer.
  void SetGate(const LinkBuffer& buffer) { gate_buffer_ = buffer; }

  // Runs copies between the ends of `buffer` beside all later measurements. The buffer is pinned,
  // not used otherwise meanwhile, and ready for use on any stream of `device`.
  absl::Status AddTraffic(Device& device, CopyDirection direction, const LinkBuffer& buffer);
  // Waits for submitted copies and removes the traffic. On an error the traffic stays for Settle.
  absl::Status ClearTraffic();

  // Returns the mean microseconds per submission of `load`, whose memory must be pinned.
  absl::StatusOr<double> MeasureUs(const LinkLoad& load);

  // Measures pageable memory, without gate and traffic. These copies block the host, so the result
  // includes a part of the host's work.
  absl::StatusOr<double> MeasureUngatedUs(const LinkLoad& load);

  // Waits until no submitted copy can touch memory. OkStatus confirms that.
  absl::Status Settle();

 private:
  // One stream of traffic.
  struct Lane {
    Device* device = nullptr;
    CopyDirection direction = CopyDirection::kHostToDevice;
    CopyPiece piece;
    uint64_t first_bytes = 0;  // of the first copy; differs per lane, so that they alternate
    StreamHandle stream;
    EventHandle end;
  };
  struct Sample {
    bool gate_held = false;
    bool traffic_lasted = false;
    double us = 0;
  };

  explicit LinkMeter(Device& device) : device_(device) {}

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
  // Last sufficient gate and traffic, as rates: the starting point for the next load of any size.
  static constexpr double kLeastGate = 1.0 / 16;
  static constexpr double kLeastTraffic = 1.25;  // a margin, until the host has seen the end
  double gate_copies_per_submission_ = kLeastGate;
  double traffic_bytes_per_byte_ = kLeastTraffic;  // of one direction or device
};

}  // namespace pinion

#endif  // PINION_ENGINE_LINK_LINK_METER_H_
