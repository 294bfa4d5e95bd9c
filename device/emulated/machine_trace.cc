#include "pinion/device/emulated/machine_trace.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace pinion {
namespace {

// Rows after those of the streams, whose numbers are small.
constexpr int kStallRow = 100'000;
constexpr int kHost = 100'000;  // its process
constexpr int kPinRow = 0;

// The time model reports a stall in parts. A part continues the stall that ends at its start.
constexpr double kSameMomentMs = 1e-9;

}  // namespace

MachineTrace::MachineTrace()
    : trace_("modelled by the emulated accelerator, not measured", kHost, "host, in modelled time",
             /*origin_ms=*/0) {
  trace_.NameRow(kHost, kPinRow, "pinning");
}

MachineTrace::CopiedOutMap::iterator MachineTrace::CutAt(uintptr_t address) {
  const auto next = copied_out_.lower_bound(address);
  if (next == copied_out_.begin()) return next;
  CopiedOut& before = std::prev(next)->second;
  if (before.end <= address) return next;
  const CopiedOut rest = before;
  before.end = address;
  return copied_out_.emplace_hint(next, address, rest);
}

std::pair<MachineTrace::CopiedOutMap::iterator, MachineTrace::CopiedOutMap::iterator>
MachineTrace::CopiedOutInto(const void* data, uint64_t size_bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {CutAt(begin), CutAt(begin + size_bytes)};
}

// A copy out's number identifies its arrows; several copies in may end them.
void MachineTrace::WillCopy(uint64_t number, CopyDirection direction,
                            absl::Span<const CopyPiece> pieces) {
  const bool out = direction == CopyDirection::kDeviceToHost;
  Submitted& copy = submitted_[number];
  if (out) copy.arrow_from = number;
  for (const CopyPiece& piece : pieces) {
    copy.size_bytes += piece.size_bytes;
    const void* const host = out ? piece.dst : piece.src;
    const auto [first, end] = CopiedOutInto(host, piece.size_bytes);
    if (out) {
      copied_out_.erase(first, end);
      const auto begin = reinterpret_cast<uintptr_t>(host);
      copied_out_[begin] = {begin + piece.size_bytes, number};
    } else {
      for (auto it = first; it != end; ++it) copy.arrows_to.insert(it->second.number);
    }
  }
}

void MachineTrace::OnDone(const TimedWork& work) {
  const Submitted submitted = submitted_[work.number];
  submitted_.erase(work.number);
  trace_.Add({.process = work.device,
              .row = work.stream,
              .name = work.name,
              .start_ms = work.start_ms,
              .end_ms = work.end_ms,
              .size_bytes = submitted.size_bytes,
              .operator_name = work.is_copy ? "" : work.name,
              .arrow_from = submitted.arrow_from,
              .arrows_to = submitted.arrows_to});
}

void MachineTrace::OnStall(const TimedStall& stall) {
  const auto [found, added] = stalls_.try_emplace(stall.device);
  if (added) {
    trace_.NameRow(stall.device, kStallRow, "stalls: compute or the host waits for a copy");
  }
  ChromeTrace::Slice& last = found->second;
  const std::string name = "waits for " + stall.name;
  // Two streams that wait at once are one stall of the device.
  const double start_ms = std::max(stall.start_ms, last.end_ms);
  if (start_ms >= stall.end_ms) return;
  if (last.name == name && stall.start_ms <= last.end_ms + kSameMomentMs) {
    last.end_ms = stall.end_ms;
    return;
  }
  trace_.Add(std::move(last));
  last = {.process = stall.device,
          .row = kStallRow,
          .name = name,
          .start_ms = start_ms,
          .end_ms = stall.end_ms};
}

void MachineTrace::OnMemory(int device, double now_ms, uint64_t in_use_bytes) {
  trace_.AddSample(
      {.process = device, .name = "device memory", .time_ms = now_ms, .value_bytes = in_use_bytes});
}

void MachineTrace::OnPin(double start_ms, double end_ms, uint64_t size_bytes) {
  trace_.Add({.process = kHost,
              .row = kPinRow,
              .name = "pin host memory",
              .start_ms = start_ms,
              .end_ms = end_ms,
              .size_bytes = size_bytes});
}

void MachineTrace::Restart(double now_ms) { trace_.Restart(now_ms); }

ChromeTrace MachineTrace::Finish() const {
  ChromeTrace whole = trace_;
  for (const auto& [device, stall] : stalls_) whole.Add(stall);
  return whole;
}

}  // namespace pinion
